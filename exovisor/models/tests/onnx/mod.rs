//! Writes small ONNX files (onnx.proto, by its field numbers).

// Each test file uses some of it.
#![allow(dead_code)]

/// `elem_type` of 32-bit floats and of 64-bit integers.
pub const F32: u64 = 1;
pub const I64: u64 = 7;

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

pub fn int(field: u64, value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3, &mut out);
    varint(value, &mut out);
    out
}

pub fn bytes(field: u64, content: impl AsRef<[u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3 | 2, &mut out);
    varint(content.as_ref().len() as u64, &mut out);
    out.extend_from_slice(content.as_ref());
    out
}

/// A tensor's name, type, shape and data.
pub fn tensor(name: &str, ty: u64, dims: &[u64], data: &[u8]) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|dim| int(1, *dim)).collect();
    [dims, int(2, ty), bytes(8, name), bytes(9, data)].concat()
}

pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// An input or output of the graph. A dimension of 0 has no value.
pub fn value(name: &str, ty: u64, dims: &[u64]) -> Vec<u8> {
    let dim = |dim: &u64| match dim {
        0 => bytes(1, bytes(2, "n")),
        dim => bytes(1, int(1, *dim)),
    };
    let shape: Vec<u8> = dims.iter().flat_map(dim).collect();
    let tensor = [int(1, ty), bytes(2, shape)].concat();
    [bytes(1, name), bytes(2, bytes(1, tensor))].concat()
}

pub fn node(operator: &str, inputs: &[&str], output: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    let inputs: Vec<u8> = inputs.iter().flat_map(|input| bytes(1, input)).collect();
    let attributes: Vec<u8> = attributes.iter().flat_map(|one| bytes(5, one)).collect();
    [inputs, bytes(2, output), bytes(3, output), bytes(4, operator), attributes].concat()
}

pub fn ints(name: &str, values: &[i64]) -> Vec<u8> {
    let values: Vec<u8> = values.iter().flat_map(|value| int(8, *value as u64)).collect();
    [bytes(1, name), values, int(20, 7)].concat()
}

/// A model of nodes, constants, inputs and outputs.
pub fn model(
    nodes: &[Vec<u8>],
    constants: &[Vec<u8>],
    inputs: &[Vec<u8>],
    outputs: &[Vec<u8>],
) -> Vec<u8> {
    let all = |field: u64, parts: &[Vec<u8>]| -> Vec<u8> {
        parts.iter().flat_map(|part| bytes(field, part)).collect()
    };
    let graph =
        [all(1, nodes), bytes(2, "graph"), all(5, constants), all(11, inputs), all(12, outputs)];
    let opset = [bytes(1, ""), int(2, 13)].concat();
    [int(1, 8), bytes(7, graph.concat()), bytes(8, opset)].concat()
}

/// `y = relu(x * w + b)` of two numbers to three.
pub fn layer() -> Vec<u8> {
    let weights = floats(&[1.0, 2.0, -3.0, 0.5, -1.0, 4.0]);
    model(
        &[
            node("MatMul", &["x", "w"], "xw", &[]),
            node("Add", &["xw", "b"], "sum", &[]),
            node("Relu", &["sum"], "y", &[]),
        ],
        &[tensor("w", F32, &[2, 3], &weights), tensor("b", F32, &[3], &floats(&[0.25, 0.0, 1.0]))],
        &[value("x", F32, &[1, 2])],
        &[value("y", F32, &[1, 3])],
    )
}
