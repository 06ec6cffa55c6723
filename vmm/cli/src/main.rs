//! The `exocell` command. Start at [`args::Cli`], then `commands`.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod progress;
mod session;
mod show;
mod terminal;

fn main() -> std::process::ExitCode {
    let cli = match args::parse() {
        Ok(cli) => cli,
        Err(code) => return code.into(),
    };
    match commands::dispatch(cli) {
        Ok(code) => code.into(),
        Err(error) => {
            eprintln!("exocell: {error}");
            error.exit_code().into()
        }
    }
}
