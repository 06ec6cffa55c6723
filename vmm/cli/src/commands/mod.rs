//! One module a verb (or a family of small ones).

mod again;
mod bench;
mod budget;
mod build;
mod caps;
mod cells;
mod containerd;
mod copy;
mod docker;
mod doctor;
mod events;
mod exec;
mod explain;
mod image;
mod image_list;
mod kernel;
mod logs;
mod man;
mod mcp;
mod metrics;
mod module;
mod mount;
mod network;
mod pool;
mod reach;
mod run;
mod serve;
mod srt;
mod staging;
mod stats;
mod swebench;
mod system;
mod volume;

use exocell_cell::agent::printable_lines;
use exocell_cell::{CellError, Layout, networks, restart, switches};

use crate::args::{Cli, Command, ImageCommand};
use crate::show::say;
pub use explain::STAGE as EXPLAIN;
pub use serve::STAGES as SERVE;

/// Runs the command; its exit code.
pub fn dispatch(cli: Cli) -> Result<u8, CellError> {
    // What is started with it may have another working directory.
    let root = std::path::absolute(cli.root.unwrap_or_else(Layout::default_root))
        .map_err(CellError::host("cannot find the state root"))?;
    let layout = Layout::new(root);
    layout.check_owner()?;
    staging::sweep(&layout);
    match cli.command {
        Command::Run(args) => run::run(&layout, *args),
        Command::Exec(args) => exec::exec(&layout, args),
        Command::Start(args) => again::start(&layout, &args),
        Command::Restart(args) => again::restart(&layout, &args),
        Command::Attach(args) => again::attach(&layout, &args),
        Command::Top(args) => cells::top(&layout, &args),
        Command::Rename(args) => cells::rename(&layout, &args),
        Command::Ps(args) => cells::ps(&layout, &args),
        Command::Port(args) => cells::port(&layout, &args),
        Command::Build(args) => build::build(&layout, *args),
        Command::Commit(args) => image::commit(&layout, &args),
        Command::Pool(args) => pool::pool(&layout, *args),
        Command::Logs(args) => logs::logs(&layout, &args),
        Command::Cp(args) => copy::cp(&layout, &args),
        Command::Inspect(args) => cells::inspect(&layout, &args),
        Command::Stats(args) => stats::stats(&layout, &args),
        Command::Metrics => metrics::metrics(&layout),
        Command::Wait(args) => cells::wait(&layout, &args),
        Command::Stop(args) => cells::stop(&layout, &args),
        Command::Kill(args) => cells::kill(&layout, &args),
        Command::Pause(args) => cells::pause(&layout, &args, true),
        Command::Unpause(args) => cells::pause(&layout, &args, false),
        Command::Rm(args) => cells::rm(&layout, &args),
        Command::Update(args) => cells::update(&layout, &args),
        Command::Events(args) => events::events(&layout, &args),
        Command::Budget(args) => budget::budget(&layout, &args),
        Command::Image(command) => image::image(&layout, command),
        Command::Pull(args) => image::image(&layout, ImageCommand::Pull(args)),
        Command::Push(args) => image::image(&layout, ImageCommand::Push(args)),
        Command::Rmi(args) => image::image(&layout, ImageCommand::Rm(args)),
        Command::Tag(args) => image::image(&layout, ImageCommand::Tag(args)),
        Command::Save(args) => image::image(&layout, ImageCommand::Save(args)),
        Command::Load(args) => image::image(&layout, ImageCommand::Load(args)),
        Command::History(args) => image::image(&layout, ImageCommand::History(args)),
        Command::Images(args) => image::image(&layout, ImageCommand::Ls(args)),
        Command::Network(command) => network::network(&layout, command),
        Command::Volume(command) => volume::volume(&layout, command),
        Command::SwitchNetwork { name } => switches::serve(&layout, &name).map(|()| 0),
        Command::SwitchNetworkApart { name } => networks::start_apart(&layout, &name).map(|()| 0),
        Command::Caps(command) => caps::caps(&layout, command),
        Command::Kernel(command) => kernel::kernel(&layout, &command),
        Command::Swebench(command) => swebench::swebench(&layout, &command),
        Command::Containerd(command) => containerd::containerd(&layout, &command),
        Command::Serve(args) => serve::serve(&layout, &args),
        Command::Mcp(args) => mcp::mcp(&layout, args),
        Command::LaunchContainer { id } => {
            Ok(exocell_docker::launcher::launch_container(&layout, &id))
        }
        Command::RestartCell { id } => again::keep(&layout, &id),
        Command::RestartCellApart { id } => restart::keep(&layout, &id).map(|()| 0),
        Command::Module(command) => module::module(&layout, command),
        Command::Doctor(args) => doctor::doctor(&layout, &args),
        Command::Bench(args) => bench::bench(&layout, &args),
        Command::Man(args) => man::man(&layout, &args),
        Command::System(command) => system::system(&layout, &command),
        Command::Version => system::version(&layout),
        Command::Completion { shell } => {
            let mut parser = crate::args::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut parser, "exocell", &mut script);
            say!("{}", String::from_utf8_lossy(&script).trim_end());
            Ok(0)
        }
    }
}

/// Prints `value` as JSON: indented for `inspect`, else on one line.
fn print_json(value: &impl serde::Serialize, indented: bool) -> Result<(), CellError> {
    let text =
        if indented { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    let text = text.map_err(|error| CellError::Usage(format!("cannot print JSON: {error}")))?;
    // JSON stays the same JSON.
    say!("{}", printable_lines(&text));
    Ok(())
}
