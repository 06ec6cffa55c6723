//! What to say of docker's words that are not there.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Verbs, and what is there instead.
const VERBS: [(&str, &str); 20] = [
    ("create", "exocell run -d makes a cell and starts it"),
    ("container", "its verbs are exocell's own: exocell ps, run, rm, logs"),
    ("buildx", "exocell build makes an image of a Dockerfile"),
    ("builder", "exocell build makes an image of a Dockerfile; exocell system prune frees room"),
    ("login", "give EXOCELL_REGISTRY_AUTH=NAME:PASSWORD to exocell image pull and push"),
    ("logout", "EXOCELL_REGISTRY_AUTH is for one command; nothing is kept"),
    ("search", "pull the image by its name (exocell image pull)"),
    ("import", "exocell image import takes a directory, a layout or an archive"),
    ("export", "exocell cp CELL:/ - writes a tar stream of its files"),
    ("diff", "copy the files (exocell cp) and compare"),
    ("info", "exocell doctor says what this host offers, exocell version what runs"),
    (
        "compose",
        "serve Docker's API (exocell serve --docker SOCKET) and set DOCKER_HOST; compose speaks to it",
    ),
    ("swarm", "start cells one by one"),
    ("service", "start cells one by one; exocell serve --http serves Wasm modules"),
    ("stack", "start cells one by one"),
    ("node", "there is one host"),
    ("secret", "run --secret puts one into a cell's requests"),
    ("config", "share a file (run -v)"),
    ("plugin", "use what is built in"),
    ("context", "--root names another state root"),
];

/// Flags of `run`, `exec` and others, and what is there instead.
const FLAGS: [(&str, &str); 29] = [
    ("--link", "put both into one network (--network); they reach each other by name"),
    ("--ip6", "a cell's address is its own, and nobody's else"),
    ("--mac-address", "a cell's link has one end"),
    ("--expose", "-p publishes a port"),
    ("--publish-all", "-p publishes each port by its number"),
    ("--gpus", "a cell has no device of the host"),
    ("--volumes-from", "name the folders again (-v)"),
    ("--volume-driver", "volumes are folders of this host"),
    ("--ipc", "a cell has a kernel of its own"),
    ("--pid", "a cell has a kernel of its own"),
    ("--uts", "a cell has a kernel of its own"),
    ("--userns", "a cell has a kernel of its own"),
    ("--cgroupns", "a cell has a kernel of its own"),
    ("--cgroup-parent", "a cell's limits are flags of its own (-m, --cpus, --pids-limit)"),
    ("--runtime", "--strength chooses between vm and isolate"),
    ("--isolation", "--strength chooses between vm and isolate"),
    ("--log-driver", "exocell logs shows what the program wrote"),
    ("--log-opt", "exocell logs keeps the last 16 MiB"),
    ("--memory-swap", "a cell has no swap: -m is all its memory"),
    ("--memory-swappiness", "a cell has no swap: -m is all its memory"),
    ("--kernel-memory", "-m is all of a cell's memory, its kernel's too"),
    ("--oom-kill-disable", "give it more memory (-m)"),
    ("--cpu-period", "--cpus takes parts, like 0.5"),
    ("--cpu-quota", "--cpus takes parts, like 0.5"),
    ("--cpuset-mems", "a cell has one node of memory"),
    ("--blkio-weight", "a cell's disk has a size (--disk) and no weight"),
    ("--device-read-bps", "a cell's disk has a size (--disk) and no rate"),
    ("--device-write-bps", "a cell's disk has a size (--disk) and no rate"),
    ("--storage-opt", "--disk is the size of what it may write"),
];

/// One line that names the thing and the remedy, for words of docker's.
pub fn of(error: &Error) -> Option<String> {
    let (table, kind): (&[(&str, &str)], _) = match error.kind() {
        ErrorKind::InvalidSubcommand => (&VERBS, ContextKind::InvalidSubcommand),
        ErrorKind::UnknownArgument => (&FLAGS, ContextKind::InvalidArg),
        _ => return None,
    };
    let Some(ContextValue::String(word)) = error.get(kind) else { return None };
    let name = word.split('=').next().unwrap_or(word);
    let (_, remedy) = table.iter().find(|(known, _)| *known == name)?;
    Some(format!("{name} is docker's and not there: {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn words_of_dockers_are_answered_in_words() {
        let hint = |words: &[&str]| {
            let words = ["exocell"].iter().chain(words);
            crate::args::Cli::try_parse_from(words).err().and_then(|error| of(&error))
        };
        for (words, told) in [
            (&["search", "i"][..], "search is docker's and not there"),
            (&["run", "--gpus", "all", "i"], "--gpus is docker's"),
            (&["run", "--memory-swap=1g", "i"], "--memory-swap is docker's"),
        ] {
            let hint = hint(words).unwrap();
            assert!(hint.starts_with(told), "{hint}");
        }
        assert!(hint(&["run", "--no-such-flag", "i"]).is_none() && hint(&["nonsense"]).is_none());
        // What is there is not answered for.
        for (verb, _) in VERBS {
            assert!(crate::args::command().find_subcommand(verb).is_none(), "{verb}");
        }
    }
}
