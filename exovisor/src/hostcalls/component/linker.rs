//! What a component's imports are resolved to: WASI 0.2 by wasmtime-wasi, each call behind the
//! gate; functions that nobody has trap when they are called.

use super::wasi::Wasi;
use crate::hostcalls::state::State;
use crate::imports::interfaces;
use wasmtime::component::types::ComponentItem;
use wasmtime::component::{Component, HasSelf, Linker, LinkerInstance, ResourceType};
use wasmtime::{Engine, Result, format_err};
use wasmtime_wasi::ResourceTable;
use wasmtime_wasi::cli::{WasiCli, WasiCliCtxView, WasiCliView as _};
use wasmtime_wasi::p2::bindings::{cli, clocks, filesystem, io, random, sockets};
use wasmtime_wasi::sockets::{WasiSockets, WasiSocketsCtxView, WasiSocketsView as _};

/// The linker for one component.
pub(crate) fn linker(engine: &Engine, component: &Component) -> Result<Linker<State>> {
    let mut linker = Linker::new(engine);
    link_streams(&mut linker)?;
    link_gated(&mut linker)?;
    link_cli(&mut linker)?;
    link_sockets(&mut linker)?;
    let ty = component.component_type();
    for (name, item) in ty.imports(engine) {
        if interfaces::find(name).is_none() {
            stub(&mut linker.root(), engine, name, name, item.ty)?;
        }
    }
    Ok(linker)
}

fn wasi(state: &mut State) -> &mut Wasi {
    state.wasi()
}

fn table(state: &mut State) -> &mut ResourceTable {
    &mut state.wasi().table
}

fn of_cli(state: &mut State) -> WasiCliCtxView<'_> {
    state.wasi().cli()
}

fn of_sockets(state: &mut State) -> WasiSocketsCtxView<'_> {
    state.wasi().sockets()
}

/// What is behind the gate where it is opened.
fn link_streams(linker: &mut Linker<State>) -> Result<()> {
    io::error::add_to_linker::<State, HasSelf<ResourceTable>>(linker, table)?;
    io::poll::add_to_linker::<State, HasSelf<ResourceTable>>(linker, table)?;
    io::streams::add_to_linker::<State, HasSelf<ResourceTable>>(linker, table)
}

fn link_gated(linker: &mut Linker<State>) -> Result<()> {
    clocks::wall_clock::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    clocks::monotonic_clock::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    random::random::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    random::insecure::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    random::insecure_seed::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    filesystem::preopens::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    filesystem::types::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)
}

fn link_cli(linker: &mut Linker<State>) -> Result<()> {
    cli::exit::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::environment::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::stdin::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::stdout::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::stderr::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::terminal_input::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::terminal_output::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::terminal_stdin::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::terminal_stdout::add_to_linker::<State, WasiCli>(linker, of_cli)?;
    cli::terminal_stderr::add_to_linker::<State, WasiCli>(linker, of_cli)
}

/// Names and sockets are ours.
fn link_sockets(linker: &mut Linker<State>) -> Result<()> {
    let options = sockets::network::LinkOptions::default();
    sockets::network::add_to_linker::<State, HasSelf<Wasi>>(linker, &options, wasi)?;
    sockets::instance_network::add_to_linker::<State, WasiSockets>(linker, of_sockets)?;
    sockets::ip_name_lookup::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    sockets::tcp::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    sockets::tcp_create_socket::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    sockets::udp::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)?;
    sockets::udp_create_socket::add_to_linker::<State, HasSelf<Wasi>>(linker, wasi)
}

/// Defines `name`, which nobody has, so that it traps. `path` says it to people.
fn stub(
    linker: &mut LinkerInstance<'_, State>,
    engine: &Engine,
    name: &str,
    path: &str,
    item: ComponentItem,
) -> Result<()> {
    match item {
        ComponentItem::ComponentFunc(_) => {
            let message = format!("import `{path}` is not known");
            linker.func_new(name, move |_, _, _, _| Err(format_err!("{message}")))
        }
        ComponentItem::ComponentInstance(instance) => {
            let mut inner = linker.instance(name)?;
            instance.exports(engine).try_for_each(|(name, item)| {
                stub(&mut inner, engine, name, &format!("{path}#{name}"), item.ty)
            })
        }
        ComponentItem::Resource(_) => {
            linker.resource(name, ResourceType::host::<()>(), |_, _| Ok(()))
        }
        // Types are nobody's; modules and components were refused before.
        _ => Ok(()),
    }
}
