//! One run of a component.

use super::AdmittedComponent;
use crate::exec::call;
use crate::exec::drive::drive;
use crate::exec::outcome::Outcome;
use crate::hostcalls::component::Wasi;
use crate::hostcalls::context::PrepareError;
use crate::hostcalls::state::State;
use crate::preempt::cancel::CancelHandle;
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
        let cancel = CancelHandle::new(Some(Arc::clone(&component.code)), component.epochs());
        let mut state = State::new(None, cancel, memory_bytes, None);
        state.wasi = Some(Box::new(wasi));
        let store = call::store(&component.host, state, fuel)
            .map_err(|error| PrepareError::Engine { message: format!("{error:#}") })?;
        Ok(Self { component: Arc::clone(component), store })
    }

    /// What ends it from another thread.
    pub fn cancel_handle(&self) -> &CancelHandle {
        &self.store.data().cancel
    }

    /// Instantiates the component and calls `run` on this thread, until it ends or is ended.
    pub fn run(mut self, runtime: &Runtime, deadline: Option<Duration>) -> Outcome {
        let cancel = self.cancel_handle().clone();
        let call = async {
            // Whatever it waits for, its end wakes it.
            let result =
                cancel.unless_cancelled(None, call(&self.component, &mut self.store)).await;
            result.unwrap_or_else(|ended| Err(wasmtime::Error::new(ended)))
        };
        let result = match drive(call, runtime, &cancel, deadline) {
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
