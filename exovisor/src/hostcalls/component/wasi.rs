//! The host's side of a component: its streams and folders, opened, and whether the capabilities
//! behind them still hold.

use super::streams::Guarded;
use crate::hostcalls::context::{PrepareError, Spec, folder_perms, held};
use crate::hostcalls::sockets::Network;
use crate::hostcalls::stdio::Stream;
use exocell_xgate::{Kind, Live, Scope, Table};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use wasmtime_wasi::p2::SocketResult;
use wasmtime_wasi::p2::bindings::sockets::network::ErrorCode;
use wasmtime_wasi::{ResourceTable, WasiCtx, WasiCtxBuilder, WasiCtxView, WasiView};

/// Handles of a component that are open at once: files, streams, whatever is waited for.
const HANDLES_MAX: usize = 4096;

/// What the host functions of a component act on. The default reaches nothing.
#[derive(Default)]
pub(crate) struct Wasi {
    ctx: WasiCtx,
    pub(super) table: ResourceTable,
    /// Tokens of the kinds that are not reached through a handle.
    kinds: BTreeMap<Kind, Live>,
    /// What its sockets reach others through.
    network: Option<Arc<dyn Network>>,
    /// Tokens of the folders, in the order in which they are preopened.
    pub(super) folders: Vec<Live>,
    /// Token of the folder behind each open handle, by its place in the table.
    pub(super) handles: HashMap<u32, Live>,
}

impl Wasi {
    /// Opens what `holder` has capabilities for in `table`. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`PrepareError`] names the capability.
    pub fn open(table: &Table, holder: &str, spec: Spec) -> Result<Self, PrepareError> {
        let mut wasi = Self::default();
        let mut ctx = WasiCtxBuilder::new();
        ctx.args(&spec.args).envs(&spec.env).allow_blocking_current_thread(true);
        for (_, capability) in held(table, holder) {
            wasi.kinds.insert(capability.kind(), capability.live());
            let Scope::Folder(folder) = capability.scope() else { continue };
            let guest = folder.guest.to_string_lossy();
            let opened = ctx.preopened_dir(&folder.host, guest, folder_perms(capability));
            opened.map_err(|error| PrepareError::Folder {
                capability: capability.name().to_owned(),
                host: folder.host.display().to_string(),
                message: format!("{error:#}"),
            })?;
            wasi.folders.push(capability.live());
        }
        wasi.network = spec.network.clone();
        if let Some(live) = wasi.kinds.get(&Kind::Stdio) {
            attach(&mut ctx, spec, live)?;
        }
        wasi.ctx = ctx.build();
        wasi.table.set_max_capacity(HANDLES_MAX);
        Ok(wasi)
    }

    /// The token of a kind, while it is granted.
    pub(super) fn live(&self, kind: Kind) -> Option<&Live> {
        self.kinds.get(&kind).filter(|live| live.is_live())
    }

    /// What sockets reach others through.
    ///
    /// # Errors
    /// `access-denied` where there is nothing, and once it was revoked.
    pub(super) fn network(&self) -> SocketResult<Arc<dyn Network>> {
        let network = self.live(Kind::Network).and(self.network.clone());
        network.ok_or_else(|| ErrorCode::AccessDenied.into())
    }

    /// Lets a call go on that can only answer or trap.
    ///
    /// # Errors
    /// When the capability was not granted, or was revoked. It ends the component.
    pub(super) fn require(&self, kind: Kind) -> wasmtime::Result<()> {
        match self.kinds.get(&kind) {
            Some(live) if live.is_live() => Ok(()),
            Some(_) => Err(wasmtime::format_err!("the capability `{kind}` was revoked")),
            None => Err(wasmtime::format_err!(
                "a call needs the capability `{kind}`, which is not granted"
            )),
        }
    }
}

impl WasiView for Wasi {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.ctx, table: &mut self.table }
    }
}

/// Streams that are not given stay as they are: at their end, or swallowed.
fn attach(ctx: &mut WasiCtxBuilder, spec: Spec, live: &Live) -> std::io::Result<()> {
    let guarded = |stream| Guarded { stream, live: live.clone() };
    if let Some(stdin) = spec.stdin {
        ctx.stdin(guarded(Stream::input(stdin)?));
    }
    if let Some(stdout) = spec.stdout {
        ctx.stdout(guarded(Stream::output(stdout)?));
    }
    if let Some(stderr) = spec.stderr {
        ctx.stderr(guarded(Stream::output(stderr)?));
    }
    Ok(())
}
