//! What to say of words that are not there: docker's, and those that are written wrongly.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

/// Verbs, and what is there instead.
const VERBS: [(&str, &str); 20] = [
    ("create", "exocell run -d makes a cell and starts it"),
    ("container", "its verbs are exocell's own: exocell ps, run, rm; exocell system prune removes"),
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
const FLAGS: [(&str, &str); 36] = [
    ("-P", "-p publishes each port by its number"),
    ("--attach", "without -d the program's output comes here; exocell logs has it, too"),
    ("--annotation", "--label notes something of a cell"),
    ("--quiet", "2>/dev/null hides how far a pull is"),
    ("--size", "exocell system df says what cells take"),
    ("--details", "exocell inspect shows labels and environment"),
    ("--type", "exocell inspect is for cells; exocell image, volume and network have their own"),
    ("--use-api-socket", "-v shares the socket of exocell serve --docker"),
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

/// The command that a word was to be, where the parser has no idea: two letters that changed
/// places, one too many, too few or another.
pub fn meant(error: &Error, words: &[OsString], root: &Command) -> Option<String> {
    let known = error.get(ContextKind::SuggestedSubcommand).is_some();
    if error.kind() != ErrorKind::InvalidSubcommand || known {
        return None;
    }
    let ContextValue::String(word) = error.get(ContextKind::InvalidSubcommand)? else {
        return None;
    };
    // The commands that there are where it stands.
    let before = words.iter().take_while(|own| own.to_str() != Some(word));
    let at = before.fold(root, |at, own| at.find_subcommand(own).unwrap_or(at));
    let names = at.get_subcommands().flat_map(|known| {
        known.get_name_and_visible_aliases().into_iter().map(str::to_owned).collect::<Vec<_>>()
    });
    let shown = |name: &String| !name.contains('-') && distance(word, name) == 1;
    let mut near: Vec<String> = names.filter(shown).collect();
    near.sort_by_key(|name| name.len().abs_diff(word.len()));
    let name = near.first()?;
    Some(format!("`{word}` is no command; did you mean `{name}`? exocell --help lists all"))
}

/// How many letters are to be put in, left out, replaced, or exchanged with the next (optimal string
/// alignment).
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=other.len()).collect()];
    for i in 1..=one.len() {
        let mut row = vec![i];
        for j in 1..=other.len() {
            let same = usize::from(one[i - 1] != other[j - 1]);
            let mut least = (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + same);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn a_word_that_is_nearly_a_command_is_told() {
        use clap::CommandFactory;
        let told = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let error = crate::args::Cli::try_parse_from(&words).err()?;
            // What the parser tells itself.
            let shown = error.get(ContextKind::SuggestedSubcommand).map(ToString::to_string);
            shown.or_else(|| meant(&error, &words, &crate::args::Cli::command()))
        };
        for (line, name) in [
            ("exocell rnu i", "run"),
            ("exocell pss", "ps"),
            ("exocell lgos", "logs"),
            ("exocell network sl", "ls"),
        ] {
            assert!(told(line).is_some_and(|told| told.contains(name)), "{line}: {:?}", told(line));
        }
        assert!(told("exocell nonsense").is_none() && told("exocell run").is_none());
        assert_eq!((distance("rnu", "run"), distance("", "ab"), distance("ab", "ab")), (1, 2, 0));
    }

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
