//! One run of a component.

use super::{AdmittedComponent, Wasi};
use crate::call;
use crate::ending::Stopper;
use crate::isolate::{Outcome, PrepareError, State, drive};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use wasmtime::Store;

/// A component with everything open.
pub(crate) struct Command {
    component: Arc<AdmittedComponent>,
    store: Store<State>,
}

impl Command {
    /// Joins a component with what was opened for it.
    ///
    /// # Errors
    /// [`PrepareError::Engine`].
    pub fn new(
        component: &Arc<AdmittedComponent>,
        wasi: Wasi,
        memory_bytes: u64,
        fuel: u64,
    ) -> Result<Self, PrepareError> {
        let stopper = Stopper::new(Some(Arc::clone(&component.code)), component.epochs());
        let mut state = State::new(None, stopper, memory_bytes, None);
        state.wasi = Some(Box::new(wasi));
        let store = call::store(&component.host, state, fuel)
            .map_err(|error| PrepareError::Engine { message: format!("{error:#}") })?;
        Ok(Self { component: Arc::clone(component), store })
    }

    /// What ends it from another thread.
    pub fn stopper(&self) -> &Stopper {
        &self.store.data().stopper
    }

    /// Instantiates the component and calls `run` on this thread, until it ends or is ended.
    pub fn run(mut self, runtime: &Runtime, deadline: Option<Duration>) -> Outcome {
        let stopper = self.stopper().clone();
        let call = async {
            // Whatever it waits for, its end wakes it.
            let result = stopper.unless_ended(None, call(&self.component, &mut self.store)).await;
            result.unwrap_or_else(|ended| Err(wasmtime::Error::new(ended)))
        };
        let result = match drive(call, runtime, &stopper, deadline) {
            Ok(result) => result,
            Err(error) => return Outcome::Trap(format!("cannot watch the deadline: {error}")),
        };
        call::exit(&self.store);
        match result {
            Ok(Ok(())) => Outcome::Exited(0),
            Ok(Err(())) => Outcome::Exited(1),
            Err(error) => call::outcome(self.store.data(), &error),
        }
    }
}

async fn call(
    component: &AdmittedComponent,
    store: &mut Store<State>,
) -> wasmtime::Result<Result<(), ()>> {
    // From here on a signal finds an instance of this store as the caller of its way out.
    let anchor = component.host.hook.anchor(store)?;
    call::enter(&anchor, store);
    let command = component.command.instantiate_async(&mut *store).await?;
    command.wasi_cli_run().call_run(store).await
}
