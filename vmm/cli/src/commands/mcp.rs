//! `exocell mcp`: the Model Context Protocol.

use std::net::SocketAddr;
use std::path::Path;

use clap::Parser;
use exocell_cell::{CellError, Layout};
use exocell_mcp::{Door, Options};

use crate::args::{Cli, Command, McpArgs, RunArgs};
use crate::show::say;

/// How long a sandbox lives where nobody says.
const LIFETIME: &str = "1h";

pub fn mcp(layout: &Layout, args: McpArgs) -> Result<u8, CellError> {
    let root = std::path::absolute(layout.root()).map_err(CellError::host("cannot find --root"))?;
    let options = Options {
        layout: Layout::new(root),
        // The link of this process, whatever becomes of the file's name.
        executable: "/proc/self/exe".into(),
        flags: flags(&args.flags, args.image.first().map_or("", String::as_str))?,
        images: args.image,
        sandboxes_max: args.sandboxes as usize,
        door: match args.http {
            None => Door::Stdio,
            Some(address) => Door::Http { address, key: args.key_file },
        },
    };
    let ready = |at: SocketAddr, key: &Path| {
        crate::show::tell!("exocell: the key for clients is in {}", key.display());
        say!("exocell serves http://{at}/mcp");
    };
    exocell_mcp::serve(options, ready).map_err(|error| CellError::Usage(error.to_string()))?;
    Ok(0)
}

/// The flags of every sandbox. What is wrong with them is said at once, not to the first client.
fn flags(given: &[String], image: &str) -> Result<Vec<String>, CellError> {
    let words = ["exocell", "run"].into_iter().chain(given.iter().map(String::as_str));
    let parsed = Cli::try_parse_from(words.chain([image]));
    let parsed = parsed.map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        CellError::Usage(format!("after --: {first}; only flags of exocell run may stand there"))
    })?;
    let Command::Run(run) = parsed.command else {
        return Err(CellError::Usage("after --: only flags of exocell run".to_owned()));
    };
    if let Some(flag) = own(&run, image) {
        return Err(CellError::Usage(format!(
            "after --: {flag} is the server's own to say for each sandbox; leave it out"
        )));
    }
    let mut flags = given.to_vec();
    if run.timeout.is_none() {
        flags.push(format!("--timeout={LIFETIME}"));
    }
    Ok(flags)
}

/// The first of what a client's sandbox cannot be told by these flags.
fn own(run: &RunArgs, image: &str) -> Option<&'static str> {
    let taken = [
        ("an image or a command", run.image != image || !run.command.is_empty()),
        ("--detach", run.detach),
        ("--tty", run.tty),
        ("--interactive", run.interactive),
        ("--rm", run.rm),
        ("--json", run.json),
        ("--restart", run.restart != Default::default()),
        ("--name", run.name.is_some()),
        ("--cidfile", run.cidfile.is_some()),
        ("--publish", !run.publish.is_empty()),
        ("--entrypoint", run.entrypoint.is_some()),
        ("--strength", run.strength.is_some()),
    ];
    taken.into_iter().find(|(_, is_there)| *is_there).map(|(flag, _)| flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Result<Vec<String>, String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        flags(&words, "exocell/base").map_err(|error| error.to_string())
    }

    #[test]
    fn flags_of_run_are_passed_on_and_have_an_end() {
        assert_eq!(of(&["-m", "1g"]).unwrap(), ["-m", "1g", "--timeout=1h"]);
        assert_eq!(of(&["--timeout", "5m"]).unwrap(), ["--timeout", "5m"]);
    }

    #[test]
    fn what_is_no_flag_for_every_sandbox_is_refused_by_its_name() {
        for (words, named) in [
            (&["--name", "x"][..], "--name"),
            (&["-d"], "--detach"),
            (&["alpine"], "an image"),
            (&["--nonsense"], "--nonsense"),
            (&["-p", "80"], "--publish"),
        ] {
            let error = of(words).unwrap_err();
            assert!(error.contains(named), "{words:?}: {error}");
        }
    }
}
