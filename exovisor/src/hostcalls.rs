//! The host functions: WASI preview 1 by wasmtime-wasi, each behind the gate.
//!
//! Arguments are raw Wasm values here; wasmtime-wasi reads guest memory and checks it.

use crate::ending::Ended;
use crate::gate::NOTCAPABLE;
use crate::imports::{Import, MODULE};
use crate::isolate::State;
use crate::sleep;
use wasmtime::{AsContextMut, Caller, Extern, Linker, Result, bail, format_err};
use wasmtime_wasi::I32Exit;
use wasmtime_wasi::p1::wasi_snapshot_preview1::{self as p1, WasiSnapshotPreview1 as _};
use wiggle::GuestMemory;

/// Defines one host function for each line: gate, call, bookkeeping. `waits` marks those that
/// wasmtime-wasi has as async functions, `own` those of [`crate::sleep`].
macro_rules! hostcalls {
    ($linker:ident: $($mode:ident $name:ident($($arg:ident $type:ty),*);)*) => {$({
        let import = find(stringify!($name))?;
        $linker.func_wrap_async(MODULE, stringify!($name), move |mut caller: Caller<'_, State>, ($($arg,)*): ($($type,)*)| {
            Box::new(async move {
                let arguments: &[i64] = &[$(i64::from($arg)),*];
                if !caller.data().gate.permits(import, arguments) {
                    return Ok(NOTCAPABLE);
                }
                let (mut memory, state) = enter(&mut caller)?;
                let State { wasi, stopper, deadline, .. } = &mut *state;
                let wasi = wasi.as_deref_mut().ok_or_else(no_context)?;
                let work = async { hostcalls!(@$mode $name(wasi, &mut memory, $($arg),*)) };
                let errno = stopper.unless_ended(*deadline, work).await.map_err(ended)??;
                state.gate.settle(import, arguments, errno, &memory);
                Ok::<i32, wasmtime::Error>(errno)
            })
        })?;
    })*};
    (@quick $name:ident $arguments:tt) => { p1::$name $arguments };
    (@waits $name:ident $arguments:tt) => { p1::$name $arguments.await };
    (@own $name:ident $arguments:tt) => { sleep::$name $arguments.await };
}

/// Defines every name of the import table.
pub(crate) fn link(linker: &mut Linker<State>) -> Result<()> {
    link_own(linker)?;
    link_descriptors(linker)?;
    link_paths(linker)?;
    linker
        .func_wrap(MODULE, "proc_exit", |code: i32| -> Result<()> { Err(I32Exit(code).into()) })?;
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
        own poll_oneoff(wanted i32, events i32, count i32, out i32);
        quick proc_raise(signal i32);
        quick sched_yield();
        quick random_get(buffer i32, length i32);
        quick sock_accept(fd i32, flags i32, out i32);
        quick sock_recv(fd i32, data i32, count i32, flags i32, size i32, out i32);
        quick sock_send(fd i32, data i32, count i32, flags i32, out i32);
        quick sock_shutdown(fd i32, how i32);
    }
    Ok(())
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

fn find(name: &str) -> Result<&'static Import> {
    Import::find(MODULE, name).ok_or_else(|| format_err!("{name} is not in the import table"))
}

fn ended(ended: Ended) -> wasmtime::Error {
    wasmtime::Error::new(ended)
}

fn no_context() -> wasmtime::Error {
    format_err!("the isolate was made without host functions")
}

/// Borrows the guest's memory and the host's state side by side.
fn enter<'a>(caller: &'a mut Caller<'_, State>) -> Result<(GuestMemory<'a>, &'a mut State)> {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        bail!("the module exports no memory named `memory`");
    };
    // Bounds what one call may make the host allocate (wasmtime, Store::set_hostcall_fuel).
    let fuel = caller.as_context_mut().hostcall_fuel();
    let (memory, state) = memory.data_and_store_mut(caller);
    if let Some(wasi) = &mut state.wasi {
        wasi.set_hostcall_fuel(fuel);
    }
    Ok((GuestMemory::Unshared(memory), state))
}
