//! The host functions: WASI preview 1 by wasmtime-wasi, each behind the gate.
//!
//! Arguments are raw Wasm values here; wasmtime-wasi reads guest memory and checks it.

pub(crate) mod builtins;
pub(crate) mod component;
pub(crate) mod context;
pub(crate) mod gate;
pub(crate) mod guest;
pub(crate) mod limits;
pub(crate) mod nn;
pub(crate) mod overlay;
pub(crate) mod sleep;
pub(crate) mod sockets;
pub(crate) mod state;
pub(crate) mod stdio;
pub(crate) mod threads;

use crate::hostcalls::builtins::{memory, shared};
use crate::hostcalls::context::{Attached, HostState};
use crate::hostcalls::gate::NOTCAPABLE;
use crate::hostcalls::sleep::Poll;
use crate::hostcalls::state::State;
use crate::imports::{WASI, Wasi};
use crate::preempt::cancel::{CancelHandle, Cancelled};
use std::time::Instant;
use tokio::sync::MutexGuard;
use wasmtime::{AsContextMut, Caller, Linker, Result, format_err};
use wasmtime_wasi::I32Exit;
use wasmtime_wasi::p1::wasi_snapshot_preview1::{self as p1, WasiSnapshotPreview1 as _};

/// `errno::success` of WASI preview 1.
const SUCCESS: i32 = 0;
/// `errno::notsock` of WASI preview 1.
const NOTSOCK: i32 = 57;

/// Defines one host function for each line: gate, call, bookkeeping. `waits` marks those that
/// wasmtime-wasi has as async functions.
macro_rules! hostcalls {
    ($linker:ident: $($mode:ident $name:ident($($arg:ident $type:ty),*);)*) => {$({
        let call = Wasi::$name;
        $linker.func_wrap_async(WASI, stringify!($name), move |mut caller: Caller<'_, State>, ($($arg,)*): ($($type,)*)| {
            Box::new(async move {
                let arguments: &[i64] = &[$(i64::from($arg)),*];
                let Host { attached, cancel, deadline } = Host::of(&caller)?;
                let mut host_state = host_state(&attached, &cancel, deadline).await?;
                if !host_state.gate.permits(call.import(), arguments) {
                    return Ok(NOTCAPABLE);
                }
                host_state.wasi.set_hostcall_fuel(caller.as_context_mut().hostcall_fuel());
                let shared = shared(&caller);
                let mut memory = memory(&mut caller, shared.as_ref())?;
                if sockets::is_for(&host_state.sockets, call, arguments) {
                    let work = sockets::call(&attached, host_state, call, arguments, &mut memory);
                    return cancel.unless_cancelled(deadline, work).await.map_err(ended);
                }
                let HostState { wasi, gate, overlays, .. } = &mut *host_state;
                let work = async {
                    match overlays.call(wasi, call, arguments, &mut memory).await {
                        Some(errno) => Ok(errno),
                        None => hostcalls!(@$mode $name(wasi, &mut memory, $($arg),*)),
                    }
                };
                let errno = cancel.unless_cancelled(deadline, work).await.map_err(ended)??;
                gate.settle(call, arguments, errno, &memory);
                Ok::<i32, wasmtime::Error>(errno)
            })
        })?;
    })*};
    (@quick $name:ident $arguments:tt) => { p1::$name $arguments };
    (@waits $name:ident $arguments:tt) => { p1::$name $arguments.await };
    // Those that wasmtime-wasi does not have.
    (@socket $name:ident $arguments:tt) => { Ok::<i32, wasmtime::Error>(NOTSOCK) };
}

/// What a hostcall takes from the isolate's state.
pub(crate) struct Host {
    pub attached: Attached,
    pub cancel: CancelHandle,
    pub deadline: Option<Instant>,
}

impl Host {
    pub fn of(caller: &Caller<'_, State>) -> Result<Self> {
        let State { attached, cancel, deadline, .. } = caller.data();
        let attached = attached.clone().ok_or_else(no_context)?;
        Ok(Self { attached, cancel: cancel.clone(), deadline: *deadline })
    }
}

/// The host's side, once no other thread of the isolate is in a hostcall.
pub(crate) async fn host_state<'a>(
    attached: &'a Attached,
    cancel: &CancelHandle,
    deadline: Option<Instant>,
) -> Result<MutexGuard<'a, HostState>> {
    match attached.0.try_lock() {
        Ok(host_state) => Ok(host_state),
        Err(_) => cancel.unless_cancelled(deadline, attached.0.lock()).await.map_err(ended),
    }
}

/// Defines every name of the import table.
pub(crate) fn link(linker: &mut Linker<State>) -> Result<()> {
    builtins::link(linker)?;
    threads::link(linker)?;
    nn::link(linker)?;
    link_own(linker)?;
    link_waits(linker)?;
    link_descriptors(linker)?;
    link_sockets(linker)?;
    link_paths(linker)?;
    let exit = Wasi::proc_exit.import().name;
    linker.func_wrap(WASI, exit, |code: i32| -> Result<()> { Err(I32Exit(code).into()) })?;
    Ok(())
}

fn link_own(linker: &mut Linker<State>) -> Result<()> {
    hostcalls! { linker:
        quick args_get(argv i32, buffer i32);
        quick args_sizes_get(count i32, bytes i32);
        quick environ_get(environ i32, buffer i32);
        quick environ_sizes_get(count i32, bytes i32);
        quick clock_res_get(clock i32, out i32);
        quick clock_time_get(clock i32, precision i64, out i32);
        quick proc_raise(signal i32);
        quick random_get(buffer i32, length i32);
    }
    Ok(())
}

fn link_sockets(linker: &mut Linker<State>) -> Result<()> {
    hostcalls! { linker:
        quick sock_accept(fd i32, flags i32, out i32);
        quick sock_recv(fd i32, data i32, count i32, flags i32, size i32, out i32);
        quick sock_send(fd i32, data i32, count i32, flags i32, out i32);
        quick sock_shutdown(fd i32, how i32);
        socket sock_open(family i32, kind i32, out i32);
        socket sock_bind(fd i32, address i32, port i32);
        socket sock_listen(fd i32, backlog i32);
        socket sock_connect(fd i32, address i32, port i32);
        socket sock_recv_from(fd i32, data i32, count i32, address i32, flags i32, port i32, size i32, out i32);
        socket sock_send_to(fd i32, data i32, count i32, address i32, port i32, flags i32, out i32);
        socket sock_getaddrinfo(host i32, host_length i32, service i32, service_length i32, hint i32, first i32, most i32, out i32);
        socket sock_getpeeraddr(fd i32, address i32, family i32, port i32);
        socket sock_getlocaladdr(fd i32, address i32, family i32, port i32);
        socket sock_getsockopt(fd i32, level i32, name i32, value i32, size i32);
        socket sock_setsockopt(fd i32, level i32, name i32, value i32, size i32);
    }
    Ok(())
}

/// Those in which a thread only waits: others of its isolate go on.
fn link_waits(linker: &mut Linker<State>) -> Result<()> {
    linker.func_wrap_async(
        WASI,
        Wasi::sched_yield.import().name,
        |_: Caller<'_, State>, (): ()| {
            Box::new(async {
                sleep::give_way().await;
                Ok(SUCCESS)
            })
        },
    )?;
    linker.func_wrap_async(
        WASI,
        Wasi::poll_oneoff.import().name,
        |caller: Caller<'_, State>, (wanted, events, count, out): (i32, i32, i32, i32)| {
            Box::new(poll(caller, Poll { wanted, events, count, out }))
        },
    )?;
    Ok(())
}

async fn poll(mut caller: Caller<'_, State>, asked: Poll) -> Result<i32> {
    let Host { attached, cancel, deadline } = Host::of(&caller)?;
    let mut host_state = host_state(&attached, &cancel, deadline).await?;
    if !host_state.gate.permits(Wasi::poll_oneoff.import(), &[]) {
        return Ok(NOTCAPABLE);
    }
    host_state.wasi.set_hostcall_fuel(caller.as_context_mut().hostcall_fuel());
    let shared = shared(&caller);
    let mut memory = memory(&mut caller, shared.as_ref())?;
    if let Some(sockets) = sockets::Asked::read(asked, &mut host_state, &mut memory) {
        let work = sockets::wait(sockets, host_state, asked, &mut memory);
        return cancel.unless_cancelled(deadline, work).await.map_err(ended);
    }
    let work = async {
        match asked.timeout(&memory) {
            Some(timeout) => {
                drop(host_state);
                timeout.wait(asked, &mut memory).await
            }
            None => {
                let Poll { wanted, events, count, out } = asked;
                p1::poll_oneoff(&mut host_state.wasi, &mut memory, wanted, events, count, out).await
            }
        }
    };
    cancel.unless_cancelled(deadline, work).await.map_err(ended)?
}

fn link_descriptors(linker: &mut Linker<State>) -> Result<()> {
    hostcalls! { linker:
        waits fd_advise(fd i32, offset i64, length i64, advice i32);
        quick fd_allocate(fd i32, offset i64, length i64);
        waits fd_close(fd i32);
        waits fd_datasync(fd i32);
        waits fd_fdstat_get(fd i32, out i32);
        quick fd_fdstat_set_flags(fd i32, flags i32);
        quick fd_fdstat_set_rights(fd i32, base i64, inheriting i64);
        waits fd_filestat_get(fd i32, out i32);
        waits fd_filestat_set_size(fd i32, size i64);
        waits fd_filestat_set_times(fd i32, accessed i64, modified i64, flags i32);
        waits fd_pread(fd i32, data i32, count i32, offset i64, out i32);
        quick fd_prestat_get(fd i32, out i32);
        quick fd_prestat_dir_name(fd i32, path i32, length i32);
        waits fd_pwrite(fd i32, data i32, count i32, offset i64, out i32);
        waits fd_read(fd i32, data i32, count i32, out i32);
        waits fd_readdir(fd i32, buffer i32, length i32, cookie i64, out i32);
        waits fd_renumber(from i32, to i32);
        waits fd_seek(fd i32, offset i64, whence i32, out i32);
        waits fd_sync(fd i32);
        quick fd_tell(fd i32, out i32);
        waits fd_write(fd i32, data i32, count i32, out i32);
    }
    Ok(())
}

fn link_paths(linker: &mut Linker<State>) -> Result<()> {
    hostcalls! { linker:
        waits path_create_directory(fd i32, path i32, length i32);
        waits path_filestat_get(fd i32, flags i32, path i32, length i32, out i32);
        waits path_filestat_set_times(fd i32, flags i32, path i32, length i32, accessed i64, modified i64, set i32);
        waits path_link(from i32, flags i32, old i32, old_length i32, to i32, new i32, new_length i32);
        waits path_open(fd i32, lookup i32, path i32, length i32, open i32, base i64, inheriting i64, flags i32, out i32);
        waits path_readlink(fd i32, path i32, length i32, buffer i32, size i32, out i32);
        waits path_remove_directory(fd i32, path i32, length i32);
        waits path_rename(from i32, old i32, old_length i32, to i32, new i32, new_length i32);
        waits path_symlink(target i32, target_length i32, fd i32, path i32, length i32);
        waits path_unlink_file(fd i32, path i32, length i32);
    }
    Ok(())
}

pub(crate) fn ended(ended: Cancelled) -> wasmtime::Error {
    wasmtime::Error::new(ended)
}

fn no_context() -> wasmtime::Error {
    format_err!("the isolate was made without host functions")
}
