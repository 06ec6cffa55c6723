//! What a network is to a component: a handle that anyone has, and words for errors. What is
//! reached with it is asked of the gate. And what its sockets have in common.

use super::wasi::Wasi;
use super::wire::code;
use crate::hostcalls::sockets::Errno;
use wasmtime::Result;
use wasmtime::component::Resource;
use wasmtime_wasi::p2::SocketError;
use wasmtime_wasi::p2::bindings::sockets::network::{
    ErrorCode, Host, HostNetwork, IpAddressFamily, Network,
};
use wasmtime_wasi::sockets::WasiSocketsView as _;

/// The handle of what we have in the table under the name of one of wasmtime-wasi's resources.
pub(super) fn ours<Theirs: 'static, Ours: 'static>(handle: &Resource<Theirs>) -> Resource<Ours> {
    Resource::new_borrow(handle.rep())
}

pub(super) fn family(is_v6: bool) -> IpAddressFamily {
    if is_v6 { IpAddressFamily::Ipv6 } else { IpAddressFamily::Ipv4 }
}

/// Why a network did not connect.
pub(super) fn failed(errno: Errno) -> ErrorCode {
    match errno {
        // The network's "too much at once".
        Errno::Again => ErrorCode::NewSocketLimit,
        errno => code(errno),
    }
}

/// Defines settings that our sockets do not have.
macro_rules! missing {
    ($get:ident: $($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        fn $name(&mut self, fd: Fd, $($arg: $type),*) -> SocketResult<$result> {
            self.$get(&fd)?;
            $(let _ = $arg;)*
            Err(ErrorCode::NotSupported.into())
        }
    )*};
}
pub(super) use missing;

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
