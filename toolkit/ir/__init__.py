"""The intermediate representation: an indexed, journaled graph on the ONNX protobuf."""
