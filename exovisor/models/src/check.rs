//! What a model may consist of, looked at before anything is made of it.

use crate::{MODEL_BYTES_MAX, ModelError};
use std::collections::{BTreeMap, BTreeSet};
use tract_onnx::pb::tensor_shape_proto::dimension::Value as Dim;
use tract_onnx::pb::type_proto::Value as Type;
use tract_onnx::pb::{
    AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto,
};
use tract_onnx::prelude::TractError;
use tract_onnx::tract_core::framework::Framework;

const NODES_MAX: usize = 10_000;
const INPUTS_MAX: usize = 64;
const RANK_MAX: usize = 8;
const ELEMENTS_MAX: u64 = 1 << 31;
/// Largest number in an attribute: a kernel, a padding, an axis.
const NUMBER_MAX: u64 = 1 << 16;
/// Numbers that say what shape something gets.
const SHAPE_ELEMENTS_MAX: u64 = 64;

/// Operators whose results have shapes that follow from those of their operands, and the
/// operands that say a shape, an axis or a bound: these must be constants.
const OPERATORS: &[(&str, &[usize])] = &[
    ("Abs", &[]),
    ("Add", &[]),
    ("ArgMax", &[]),
    ("ArgMin", &[]),
    ("AveragePool", &[]),
    ("BatchNormalization", &[]),
    ("Cast", &[]),
    ("Ceil", &[]),
    ("Clip", &[1, 2]),
    ("Concat", &[]),
    ("Conv", &[]),
    ("Cos", &[]),
    ("Div", &[]),
    ("Dropout", &[1, 2]),
    ("Elu", &[]),
    ("Equal", &[]),
    ("Erf", &[]),
    ("Exp", &[]),
    ("Flatten", &[]),
    ("Floor", &[]),
    ("Gather", &[]),
    ("Gelu", &[]),
    ("Gemm", &[]),
    ("GlobalAveragePool", &[]),
    ("GlobalMaxPool", &[]),
    ("Greater", &[]),
    ("HardSigmoid", &[]),
    ("HardSwish", &[]),
    ("Identity", &[]),
    ("InstanceNormalization", &[]),
    ("LRN", &[]),
    ("LayerNormalization", &[]),
    ("LeakyRelu", &[]),
    ("Less", &[]),
    ("Log", &[]),
    ("LogSoftmax", &[]),
    ("MatMul", &[]),
    ("Max", &[]),
    ("MaxPool", &[]),
    ("Min", &[]),
    ("Mul", &[]),
    ("Neg", &[]),
    ("PRelu", &[]),
    ("Pow", &[]),
    ("Reciprocal", &[]),
    ("ReduceL2", &[1]),
    ("ReduceMax", &[1]),
    ("ReduceMean", &[1]),
    ("ReduceMin", &[1]),
    ("ReduceSum", &[1]),
    ("Relu", &[]),
    ("Reshape", &[1]),
    ("Round", &[]),
    ("Selu", &[]),
    ("Sigmoid", &[]),
    ("Sign", &[]),
    ("Sin", &[]),
    ("Slice", &[1, 2, 3, 4]),
    ("Softmax", &[]),
    ("Softplus", &[]),
    ("Split", &[1]),
    ("Sqrt", &[]),
    ("Squeeze", &[1]),
    ("Sub", &[]),
    ("Tanh", &[]),
    ("Transpose", &[]),
    ("Unsqueeze", &[1]),
    ("Where", &[]),
];

/// A model whose parts are all known, with its `Constant` nodes among the initializers.
pub(crate) struct Checked {
    pub model: ModelProto,
    /// Initializers that say shapes; the data of all others says none.
    pub shapes: BTreeSet<String>,
}

pub(crate) fn check(bytes: &[u8]) -> Result<Checked, ModelError> {
    at_most("bytes", bytes.len(), MODEL_BYTES_MAX)?;
    let mut model = decode(bytes)?;
    let graph =
        model.graph.as_mut().ok_or_else(|| ModelError::NotOnnx("it has no graph".into()))?;
    at_most("nodes", graph.node.len(), NODES_MAX)?;
    at_most("inputs", graph.input.len(), NODES_MAX)?;
    if !graph.sparse_initializer.is_empty() {
        return Err(unsupported("has sparse tensors"));
    }
    lift_constants(graph);
    // What it claims of its inner values is found out anyway.
    graph.value_info.clear();
    let constants: BTreeMap<&str, &TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    if constants.len() != graph.initializer.len() {
        return Err(unsupported("has two constants of one name"));
    }
    graph.initializer.iter().try_for_each(constant)?;
    let inputs = graph.input.iter().filter(|input| !constants.contains_key(input.name.as_str()));
    let inputs: Vec<&ValueInfoProto> = inputs.collect();
    at_most("inputs", inputs.len(), INPUTS_MAX)?;
    inputs.iter().try_for_each(|input| fixed(input))?;
    let shapes = names(graph, &constants, &inputs)?;
    Ok(Checked { model, shapes })
}

fn decode(bytes: &[u8]) -> Result<ModelProto, ModelError> {
    let broken = |error: TractError| ModelError::NotOnnx(format!("{error:#}"));
    tract_onnx::onnx().proto_model_for_read(&mut &bytes[..]).map_err(broken)
}

/// Each node's operands exist before it, and shapes are constants. Answers with those.
fn names(
    graph: &GraphProto,
    constants: &BTreeMap<&str, &TensorProto>,
    inputs: &[&ValueInfoProto],
) -> Result<BTreeSet<String>, ModelError> {
    let mut known: BTreeSet<&str> = constants.keys().copied().collect();
    known.extend(inputs.iter().map(|input| input.name.as_str()));
    let (mut shapes, mut data) = (BTreeSet::new(), BTreeSet::new());
    for node in &graph.node {
        for (index, name) in node.input.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            if !known.contains(name.as_str()) {
                return Err(unsupported(format!("uses `{name}` before it is there")));
            }
            if !operator(node)?.contains(&index) {
                data.insert(name.as_str());
                continue;
            }
            let constant = constants.get(name.as_str()).ok_or_else(|| {
                unsupported(format!(
                    "has a shape that depends on data: operand {index} of `{}` ({}); simplify it first",
                    node.name, node.op_type
                ))
            })?;
            at_most(
                "numbers of a shape",
                elements(&constant.dims)? as usize,
                SHAPE_ELEMENTS_MAX as usize,
            )?;
            shapes.insert(name.clone());
        }
        operator(node)?;
        node.attribute.iter().try_for_each(|attribute| number(node, attribute))?;
        for output in node.output.iter().filter(|output| !output.is_empty()) {
            if !known.insert(output) {
                return Err(unsupported(format!("makes `{output}` twice")));
            }
        }
    }
    if let Some(both) = shapes.iter().find(|name| data.contains(name.as_str())) {
        return Err(unsupported(format!("uses `{both}` as a shape and as data")));
    }
    match graph.output.iter().find(|output| !known.contains(output.name.as_str())) {
        Some(output) => Err(unsupported(format!("never makes its output `{}`", output.name))),
        None if graph.output.is_empty() => Err(unsupported("has no output")),
        None => Ok(shapes),
    }
}

/// The operands that must be constants.
fn operator(node: &NodeProto) -> Result<&'static [usize], ModelError> {
    let known = OPERATORS.iter().find(|(name, _)| *name == node.op_type);
    match known.filter(|_| matches!(node.domain.as_str(), "" | "ai.onnx")) {
        Some((_, shapes)) => Ok(shapes),
        None => Err(unsupported(format!(
            "uses the operator `{}` of `{}`, which is not offered; simplify it first",
            node.op_type, node.domain
        ))),
    }
}

/// `Constant` nodes are initializers.
fn lift_constants(graph: &mut GraphProto) {
    let (mut nodes, mut lifted) = (Vec::new(), Vec::new());
    for mut node in graph.node.drain(..) {
        let value = node.attribute.iter_mut().find(|attribute| attribute.name == "value");
        match (node.op_type.as_str(), value.and_then(|value| value.t.take()), &node.output[..]) {
            ("Constant", Some(tensor), [name]) => {
                lifted.push(TensorProto { name: name.clone(), ..tensor });
            }
            _ => nodes.push(node),
        }
    }
    graph.node = nodes;
    graph.initializer.append(&mut lifted);
}

/// A tensor that brings its own data, all of it.
fn constant(tensor: &TensorProto) -> Result<(), ModelError> {
    let refuse = |why: &str| Err(unsupported(format!("has a constant `{}` {why}", tensor.name)));
    if tensor.data_location.unwrap_or(0) != 0 || !tensor.external_data.is_empty() {
        return refuse("in another file");
    }
    if tensor.segment.is_some() {
        return refuse("in pieces");
    }
    let count = elements(&tensor.dims)?;
    let size = match tensor.data_type {
        1 | 6 => 4,
        2 | 3 | 9 => 1,
        7 | 11 => 8,
        _ => return refuse("of a type that is not offered"),
    };
    let given = match tensor.data_type {
        _ if !tensor.raw_data.is_empty() => tensor.raw_data.len() as u64 / size,
        1 => tensor.float_data.len() as u64,
        7 => tensor.int64_data.len() as u64,
        11 => tensor.double_data.len() as u64,
        _ => tensor.int32_data.len() as u64,
    };
    match given == count && (tensor.raw_data.len() as u64).is_multiple_of(size) {
        true => Ok(()),
        false => refuse("whose data has another length than its shape"),
    }
}

/// An input of fixed shape.
fn fixed(input: &ValueInfoProto) -> Result<(), ModelError> {
    let free = || unsupported(format!("has an input `{}` without a fixed shape", input.name));
    let Some(Type::TensorType(tensor)) = input.r#type.as_ref().and_then(|ty| ty.value.as_ref())
    else {
        return Err(free());
    };
    let dims = tensor.shape.as_ref().ok_or_else(free)?.dim.iter();
    let dims = dims.map(|dim| match dim.value {
        Some(Dim::DimValue(value)) if value > 0 => Ok(value),
        _ => Err(free()),
    });
    elements(&dims.collect::<Result<Vec<i64>, _>>()?).map(drop)
}

fn elements(dims: &[i64]) -> Result<u64, ModelError> {
    at_most("dimensions of a tensor", dims.len(), RANK_MAX)?;
    let mut count: u64 = 1;
    for dim in dims {
        let dim = u64::try_from(*dim).unwrap_or(u64::MAX);
        count = count.saturating_mul(dim);
        // A zero hides nothing behind it.
        let shown = count.max(dim);
        if shown > ELEMENTS_MAX {
            return Err(too_large("numbers of a tensor", shown, ELEMENTS_MAX));
        }
    }
    Ok(count)
}

fn number(node: &NodeProto, attribute: &AttributeProto) -> Result<(), ModelError> {
    let named = |what: &str| {
        unsupported(format!("has {what} in `{}` of `{}`", attribute.name, node.op_type))
    };
    let has_graph = attribute.g.is_some() || !attribute.graphs.is_empty();
    if has_graph || attribute.t.is_some() || !attribute.tensors.is_empty() {
        return Err(named("a graph or a tensor"));
    }
    let numbers = attribute.ints.iter().chain([&attribute.i]);
    match numbers.into_iter().any(|number| number.unsigned_abs() > NUMBER_MAX) {
        true => Err(named("a number beyond 65,536")),
        false => {
            at_most("numbers of an attribute", attribute.ints.len(), SHAPE_ELEMENTS_MAX as usize)
        }
    }
}

fn at_most(what: &'static str, found: usize, max: usize) -> Result<(), ModelError> {
    match found <= max {
        true => Ok(()),
        false => Err(too_large(what, found as u64, max as u64)),
    }
}

fn too_large(what: &'static str, found: u64, max: u64) -> ModelError {
    ModelError::TooLarge { what, found, max }
}

fn unsupported(why: impl Into<String>) -> ModelError {
    ModelError::Unsupported(why.into())
}
