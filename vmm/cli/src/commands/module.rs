//! `exocell module`: what `exocell serve --http` serves.

use std::path::Path;

use exocell_cell::compile::Build;
use exocell_cell::exovisor::{Metering, Policy, Use};
use exocell_cell::granted::{self, Links};
use exocell_cell::parent::Parent;
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, Layout};
use exocell_service::{ModuleEntry, ModuleStore, Pool, StoreError};
use serde_json::json;

use super::{print_json, run::read_table};
use crate::args::ModuleCommand;
use crate::show::{self, say};

/// What a call may do where nobody says.
const DEFAULT_CAPS: &str = "version = 1\n[memory]\nlimit = \"64M\"\n[time]\ndeadline = \"10s\"\n\
                            [stdio]\n[clock]\n[random]";

pub fn module(layout: &Layout, command: ModuleCommand) -> Result<u8, CellError> {
    let store = store(layout)?;
    match command {
        ModuleCommand::Add { tenant, caps, name, file } => {
            add(layout, &store, &tenant, caps.as_deref(), &name, &file)?;
        }
        ModuleCommand::Ls { json } => {
            let kept = store.list().map_err(refused)?;
            list(&kept.entries, json)?;
            if let Some(damaged) = kept.damaged.into_iter().next() {
                return Err(refused(damaged));
            }
        }
        ModuleCommand::Key { tenant } => say!("{}", store.rekey(&tenant).map_err(refused)?),
        ModuleCommand::Rm { names } => {
            for name in &names {
                store.remove(name).map_err(refused)?;
                // There is one if it was served with a network.
                let _ = std::fs::remove_dir_all(layout.networks().join(name));
            }
        }
    }
    Ok(0)
}

/// The modules of this state root.
pub fn store(layout: &Layout) -> Result<ModuleStore, CellError> {
    ModuleStore::open(&layout.modules()).map_err(refused)
}

fn refused(error: StoreError) -> CellError {
    CellError::Usage(error.to_string())
}

fn add(
    layout: &Layout,
    store: &ModuleStore,
    tenant: &str,
    caps: Option<&Path>,
    name: &str,
    file: &Path,
) -> Result<(), CellError> {
    let caps = match caps {
        Some(path) => read_table(layout, path)?,
        None => CapabilitySet::parse(DEFAULT_CAPS, Path::new("/"))?,
    };
    let caps = match Parent::find()? {
        Some(parent) => caps.within(&parent.most)?,
        None => caps,
    };
    let caps = granted::settle(layout, caps)?;
    let module = Links::outside(layout).module(file)?;
    // By which it will be served, so that nothing is taken that is never run.
    let policy = Policy::pooled(Pool::default());
    let build = Build {
        policy: &policy,
        wanted: Use::Functions,
        metering: Metering::of(&caps),
        caps: &caps,
        deadline: None,
    };
    // What comes of it is for this machine as it is now, and kept if it was work; what counts is
    // that it compiles.
    build.compile(layout, &module, || ())?;
    let bytes = module.bytes().read();
    let bytes = bytes.map_err(CellError::host("cannot read a file in memory"))?;
    if let Some(key) = store.add(name, tenant, &bytes, &caps).map_err(refused)?.key {
        say!("{key}");
    }
    Ok(())
}

fn list(entries: &[ModuleEntry], as_json: bool) -> Result<(), CellError> {
    if as_json {
        for ModuleEntry { name, tenant, bytes, .. } in entries {
            print_json(&json!({ "name": name, "tenant": tenant, "bytes": bytes }), false)?;
        }
        return Ok(());
    }
    let row = |entry: &ModuleEntry| {
        vec![entry.name.clone(), entry.tenant.clone(), show::bytes(entry.bytes)]
    };
    show::table(&["NAME", "TENANT", "SIZE"], &entries.iter().map(row).collect::<Vec<_>>());
    Ok(())
}
