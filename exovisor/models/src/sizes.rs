//! What a run will take, from shapes alone.

use crate::check::Checked;
use crate::{ModelError, PRODUCTS_MAX, VALUES_BYTES_MAX};
use tract_onnx::pb::tensor_shape_proto::Dimension;
use tract_onnx::pb::tensor_shape_proto::dimension::Value as DimValue;
use tract_onnx::pb::type_proto::{Tensor as TensorType, Value as Type};
use tract_onnx::pb::{ModelProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto};
use tract_onnx::prelude::*;

/// Bounds memory and work. Constants are inputs here, so nothing is computed from them yet.
pub(crate) fn bound(checked: &Checked) -> Result<(), ModelError> {
    let mut model = checked.model.clone();
    demote(&mut model, checked);
    let inconsistent = |error: TractError| ModelError::Inconsistent(format!("{error:#}"));
    let mut shapes = tract_onnx::onnx().model_for_proto_model(&model).map_err(inconsistent)?;
    shapes.analyse(false).map_err(inconsistent)?;
    let (mut bytes, mut products) = (0u64, 0u64);
    for node in shapes.nodes() {
        let mut results = 0u64;
        for output in &node.outputs {
            let (count, size) = numbers(&output.fact).ok_or_else(|| {
                ModelError::Unsupported(format!("has a value of unknown shape in `{}`", node.name))
            })?;
            results = results.saturating_add(count);
            bytes = bytes.saturating_add(count.saturating_mul(size));
        }
        let work = work(&shapes, node.id, results);
        products = products.saturating_add(work);
        if node.op().name() == "Conv" {
            // Its operand is laid out anew, once for each number of a kernel.
            bytes = bytes.saturating_add(unrolled(&shapes, node.id, results).saturating_mul(4));
        }
    }
    within("bytes of all values", bytes, VALUES_BYTES_MAX)?;
    within("multiplications", products, PRODUCTS_MAX)
}

/// Constants whose data says no shape become inputs of their shape.
fn demote(model: &mut ModelProto, checked: &Checked) {
    let Some(graph) = &mut model.graph else { return };
    let (kept, demoted): (Vec<TensorProto>, _) = std::mem::take(&mut graph.initializer)
        .into_iter()
        .partition(|tensor| checked.shapes.contains(&tensor.name));
    graph.input.retain(|input| demoted.iter().all(|tensor| tensor.name != input.name));
    graph.input.extend(demoted.into_iter().map(as_input));
    graph.initializer = kept;
}

fn as_input(tensor: TensorProto) -> ValueInfoProto {
    let dim =
        |value: &i64| Dimension { value: Some(DimValue::DimValue(*value)), ..Dimension::default() };
    let shape = TensorShapeProto { dim: tensor.dims.iter().map(dim).collect() };
    let ty = TensorType { elem_type: tensor.data_type, shape: Some(shape) };
    let ty = TypeProto { value: Some(Type::TensorType(ty)), ..TypeProto::default() };
    ValueInfoProto { name: tensor.name, r#type: Some(ty), ..ValueInfoProto::default() }
}

/// How many numbers a value has, and their size.
fn numbers(fact: &InferenceFact) -> Option<(u64, u64)> {
    let shape = fact.shape.as_concrete_finite().ok()??;
    let count = shape.iter().try_fold(1u64, |count, dim| count.checked_mul(*dim as u64))?;
    Some((count, fact.datum_type()?.size_of() as u64))
}

fn operand(model: &InferenceModel, node: usize, index: usize) -> Option<Vec<usize>> {
    let outlet = model.node(node).inputs.get(index)?;
    let shape = model.outlet_fact(*outlet).ok()?.shape.as_concrete_finite().ok()??;
    Some(shape.to_vec())
}

/// Multiplications of a node, about.
fn work(model: &InferenceModel, node: usize, results: u64) -> u64 {
    let name = model.node(node).op().name();
    let depth = match name.as_ref() {
        // The kernel without its output channels.
        "Conv" => operand(model, node, 1).map(|kernel| kernel.iter().skip(1).product::<usize>()),
        // The longer side of the second operand is at least the depth.
        _ if name.contains("MatMul") || name.contains("Gemm") => {
            operand(model, node, 1).map(|other| other.iter().copied().max().unwrap_or(1))
        }
        _ => None,
    };
    results.saturating_mul(depth.unwrap_or(1).max(1) as u64)
}

fn unrolled(model: &InferenceModel, node: usize, results: u64) -> u64 {
    let Some(kernel) = operand(model, node, 1) else { return 0 };
    let channels = kernel.first().copied().unwrap_or(1).max(1) as u64;
    let volume = kernel.iter().skip(1).product::<usize>() as u64;
    (results / channels).saturating_mul(volume)
}

fn within(what: &'static str, found: u64, max: u64) -> Result<(), ModelError> {
    match found <= max {
        true => Ok(()),
        false => Err(ModelError::TooLarge { what, found, max }),
    }
}
