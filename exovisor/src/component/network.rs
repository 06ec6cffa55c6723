//! What a network is to a component: a handle that anyone has, and words for errors. What is
//! reached with it is asked of the gate.

use super::wasi::Wasi;
use wasmtime::Result;
use wasmtime::component::Resource;
use wasmtime_wasi::p2::SocketError;
use wasmtime_wasi::p2::bindings::sockets::network::{ErrorCode, Host, HostNetwork, Network};
use wasmtime_wasi::sockets::WasiSocketsView as _;

impl Host for Wasi {
    fn convert_error_code(&mut self, error: SocketError) -> Result<ErrorCode> {
        self.sockets().convert_error_code(error)
    }

    fn network_error_code(
        &mut self,
        error: Resource<wasmtime::Error>,
    ) -> Result<Option<ErrorCode>> {
        self.sockets().network_error_code(error)
    }
}

impl HostNetwork for Wasi {
    fn drop(&mut self, network: Resource<Network>) -> Result<()> {
        HostNetwork::drop(&mut self.sockets(), network)
    }
}
