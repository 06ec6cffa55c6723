//! Clocks and randomness, behind the gate: their functions have no errors to answer with, so a
//! call without the capability ends the component.

use super::wasi::Wasi;
use exocell_xgate::Kind;
use wasmtime::Result;
use wasmtime::component::Resource;
use wasmtime_wasi::clocks::WasiClocksView as _;
use wasmtime_wasi::p2::DynPollable;
use wasmtime_wasi::p2::bindings::clocks::{monotonic_clock, wall_clock};
use wasmtime_wasi::p2::bindings::random::{insecure, insecure_seed, random};
use wasmtime_wasi::random::WasiRandomView as _;

/// Defines functions that need a kind of capability and are wasmtime-wasi's beyond that.
macro_rules! required {
    ($kind:ident $view:ident $host:path: $($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        impl $host for Wasi {$(
            fn $name(&mut self, $($arg: $type),*) -> Result<$result> {
                self.require(Kind::$kind)?;
                <_ as $host>::$name(&mut self.$view(), $($arg),*)
            }
        )*}
    };
}

required! { Clock clocks wall_clock::Host:
    now() -> wall_clock::Datetime;
    resolution() -> wall_clock::Datetime;
}

required! { Clock clocks monotonic_clock::Host:
    now() -> monotonic_clock::Instant;
    resolution() -> monotonic_clock::Duration;
    subscribe_instant(when: monotonic_clock::Instant) -> Resource<DynPollable>;
    subscribe_duration(duration: monotonic_clock::Duration) -> Resource<DynPollable>;
}

required! { Random random random::Host:
    get_random_bytes(length: u64) -> Vec<u8>;
    get_random_u64() -> u64;
}

required! { Random random insecure::Host:
    get_insecure_random_bytes(length: u64) -> Vec<u8>;
    get_insecure_random_u64() -> u64;
}

required! { Random random insecure_seed::Host:
    insecure_seed() -> (u64, u64);
}
