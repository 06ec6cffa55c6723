//! A model that is ready, and one run of it.

use crate::check::check;
use crate::sizes::bound;
use crate::{Element, Form, ModelError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tract_onnx::pb::ModelProto;
use tract_onnx::prelude::*;
use tract_onnx::tract_core::framework::Framework;
use tract_onnx::tract_core::plan::eval;

/// A model that can be run, by several threads at once.
#[derive(Debug)]
pub struct Model {
    plan: Arc<TypedRunnableModel>,
    inputs: Vec<Form>,
    outputs: Vec<Form>,
}

/// Why a run has no result.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// The inputs do not fit; [`Model::inputs`] says what fits.
    #[error("the inputs are not those of the model")]
    Inputs,
    /// The caller wanted no more of it.
    #[error("it was ended")]
    Stopped,
    /// The model cannot be computed with these inputs.
    #[error("the model failed: {0}")]
    Failed(String),
}

impl Model {
    /// Checks a model and makes it ready.
    ///
    /// # Errors
    /// [`ModelError`] says what is wrong; nothing was computed.
    pub fn read(bytes: &[u8]) -> Result<Self, ModelError> {
        let made = catch_unwind(AssertUnwindSafe(|| {
            let checked = check(bytes)?;
            bound(&checked)?;
            Self::make(&checked.model)
        }));
        // A panic of the library is a model that it cannot take.
        made.unwrap_or_else(|_| Err(ModelError::Inconsistent("it cannot be made ready".into())))
    }

    fn make(model: &ModelProto) -> Result<Self, ModelError> {
        let inconsistent = |error: TractError| ModelError::Inconsistent(format!("{error:#}"));
        let typed = tract_onnx::onnx()
            .model_for_proto_model(model)
            .and_then(InferenceModelExt::into_optimized)
            .map_err(inconsistent)?;
        let forms = |outlets: &[OutletId]| -> Result<Vec<Form>, ModelError> {
            outlets.iter().map(|outlet| form(&typed, *outlet)).collect()
        };
        let inputs = forms(typed.input_outlets().map_err(inconsistent)?)?;
        let outputs = forms(typed.output_outlets().map_err(inconsistent)?)?;
        let plan = typed.into_runnable().map_err(inconsistent)?;
        Ok(Self { plan, inputs, outputs })
    }

    /// What it takes.
    #[must_use]
    pub fn inputs(&self) -> &[Form] {
        &self.inputs
    }

    /// What it gives.
    #[must_use]
    pub fn outputs(&self) -> &[Form] {
        &self.outputs
    }

    /// Computes the outputs, as bytes, like the inputs. Between operators it asks whether it is
    /// over.
    ///
    /// # Errors
    /// [`Ended`].
    pub fn run(
        &self,
        inputs: &[Vec<u8>],
        is_over: impl Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, Ended> {
        let ran = catch_unwind(AssertUnwindSafe(|| self.compute(inputs, &is_over)));
        ran.unwrap_or_else(|_| Err(Ended::Failed("an operator panicked".to_owned())))
    }

    fn compute(
        &self,
        inputs: &[Vec<u8>],
        is_over: &impl Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, Ended> {
        if inputs.len() != self.inputs.len() {
            return Err(Ended::Inputs);
        }
        let tensors: Result<TVec<TValue>, Ended> =
            inputs.iter().zip(&self.inputs).map(|(bytes, form)| tensor(bytes, form)).collect();
        let failed = |error: TractError| match is_over() {
            true => Ended::Stopped,
            false => Ended::Failed(format!("{error:#}")),
        };
        let mut state = self.plan.spawn().map_err(failed)?;
        let outputs = state
            .run_plan_with_eval(tensors?, |context, state, node, inputs| match is_over() {
                true => Err(TractError::msg("it was ended")),
                false => eval(context, state, node, inputs),
            })
            .map_err(failed)?;
        Ok(outputs.iter().map(|output| output.as_bytes().to_vec()).collect())
    }
}

fn form(model: &TypedModel, outlet: OutletId) -> Result<Form, ModelError> {
    let unknown = || ModelError::Unsupported("has an input or output of an unknown form".into());
    let fact = model.outlet_fact(outlet).map_err(|_| unknown())?;
    let dims = fact.shape.as_concrete().ok_or_else(unknown)?.to_vec();
    let element = Element::of(fact.datum_type).ok_or_else(unknown)?;
    Ok(Form { dims, element })
}

fn tensor(bytes: &[u8], form: &Form) -> Result<TValue, Ended> {
    if bytes.len() != form.bytes() {
        return Err(Ended::Inputs);
    }
    let zeros = Tensor::zero_dt(form.element.datum(), &form.dims);
    let mut tensor = zeros.map_err(|error| Ended::Failed(format!("{error:#}")))?;
    tensor.as_bytes_mut().copy_from_slice(bytes);
    Ok(tensor.into_tvalue())
}
