//! The words of a command line, before they are parsed: where a command's own flags end, and
//! flags that are given a truth value.
//!
//! `run IMAGE PROGRAM ...`, `exec CELL PROGRAM ...` and `top CELL ...` read no flag of their own
//! after the first word that is none, as docker's do. Otherwise whoever chooses a program's
//! arguments could give its cell a folder or a network.

use std::ffi::{OsStr, OsString};

use clap::{Arg, ArgAction, Command};

/// What a word of flags says, as far as it is known.
enum Flags {
    /// It holds all that it says.
    Whole,
    /// The next word is the value of its last flag.
    WantsNext,
    /// A switch that is on or off.
    Switch {
        name: String,
        on: bool,
    },
    Unknown,
}

/// The words with `--` put in where a program's own begin, and `--switch=true` said as
/// `--switch`. What is not understood stays as it is, for the parser to name.
pub fn prepared(words: impl IntoIterator<Item = OsString>, mut root: Command) -> Vec<OsString> {
    root.build();
    let mut command = &root;
    let words: Vec<OsString> = words.into_iter().collect();
    let mut words = of_cells(words, &root).into_iter();
    let mut done: Vec<OsString> = words.next().into_iter().collect();
    while let Some(word) = words.next() {
        let text = word.to_str().unwrap_or_default();
        if text == "--" {
            done.push(word);
            break;
        }
        if text.len() > 1 && text.starts_with('-') {
            match flags(command, text) {
                Flags::Whole => done.push(word),
                Flags::WantsNext => {
                    done.push(word);
                    done.extend(words.next());
                }
                Flags::Switch { name, on } => {
                    // The last one counts.
                    done.retain(|before| before.to_str() != Some(&name));
                    done.extend(on.then(|| name.into()));
                }
                Flags::Unknown => {
                    done.push(word);
                    break;
                }
            }
        } else if let Some(next) = command.find_subcommand(&word) {
            done.push(word);
            command = next;
        } else {
            done.push(word);
            if runs_a_program(command) {
                let rest: Vec<_> = words.by_ref().collect();
                if rest.first().is_some_and(|first| first != OsStr::new("--")) {
                    done.push("--".into());
                }
                done.extend(rest);
            }
            break;
        }
    }
    done.extend(words);
    done
}

/// `container VERB`, as docker has it too, is `VERB` where there is such a one.
fn of_cells(mut words: Vec<OsString>, root: &Command) -> Vec<OsString> {
    let [_, group, verb, ..] = words.as_slice() else { return words };
    if group != OsStr::new("container") {
        return words;
    }
    let verb = match verb.to_str() {
        Some("ls" | "list") => "ps".into(),
        _ => verb.clone(),
    };
    if root.find_subcommand(&verb).is_some_and(|known| !known.has_subcommands()) {
        words.splice(1..3, [verb]);
    }
    words
}

/// Whether what follows the command's first word is another's.
fn runs_a_program(command: &Command) -> bool {
    command.get_positionals().nth(1).is_some_and(Arg::is_trailing_var_arg_set)
}

fn flags(command: &Command, text: &str) -> Flags {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    if let Some(long) = name.strip_prefix("--") {
        let is = |arg: &&Arg| {
            arg.get_long() == Some(long)
                || arg.get_all_aliases().is_some_and(|all| all.contains(&long))
        };
        return match command.get_arguments().find(is) {
            Some(arg) => one(arg, name, value),
            None => Flags::Unknown,
        };
    }
    for (at, letter) in text[1..].char_indices() {
        let is = |arg: &&Arg| {
            arg.get_short() == Some(letter)
                || arg.get_all_short_aliases().is_some_and(|all| all.contains(&letter))
        };
        let Some(arg) = command.get_arguments().find(is) else { return Flags::Unknown };
        let rest = &text[1 + at + letter.len_utf8()..];
        if takes_value(arg) {
            return if rest.is_empty() && wants_next(arg) {
                Flags::WantsNext
            } else {
                Flags::Whole
            };
        }
        if at == 0 && rest.starts_with('=') {
            return one(arg, name, value);
        }
    }
    Flags::Whole
}

/// A flag that stands alone in its word.
fn one(arg: &Arg, name: &str, value: Option<&str>) -> Flags {
    match (takes_value(arg), value) {
        (true, None) if wants_next(arg) => Flags::WantsNext,
        (true, _) | (false, None) => Flags::Whole,
        // What Go's `strconv.ParseBool` takes, as docker's flags do.
        (false, Some(value)) if matches!(arg.get_action(), ArgAction::SetTrue) => match value {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => {
                Flags::Switch { name: name.to_owned(), on: true }
            }
            "0" | "f" | "F" | "false" | "FALSE" | "False" => {
                Flags::Switch { name: name.to_owned(), on: false }
            }
            _ => Flags::Whole,
        },
        (false, Some(_)) => Flags::Whole,
    }
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

fn wants_next(arg: &Arg) -> bool {
    !arg.is_require_equals_set() && arg.get_num_args().is_none_or(|number| number.min_values() > 0)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn after(line: &str) -> String {
        let words = line.split(' ').map(OsString::from);
        let done = prepared(words, Cli::command());
        done.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_words_of_a_program_are_its_own() {
        for (line, prepared) in [
            ("x run i sh -c true", "x run i -- sh -c true"),
            (
                "x run --rm -it --entrypoint ls i -v /:/x",
                "x run --rm -it --entrypoint ls i -- -v /:/x",
            ),
            ("x --root r run -m 1g -e=A=B i -d", "x --root r run -m 1g -e=A=B i -- -d"),
            ("x run -itm 1g i --help", "x run -itm 1g i -- --help"),
            ("x run -itm1g --name=n i -m 2g", "x run -itm1g --name=n i -- -m 2g"),
            ("x exec -u 1 c id -u", "x exec -u 1 c -- id -u"),
            ("x top c -eo pid", "x top c -- -eo pid"),
            ("x container ls -a", "x ps -a"),
            ("x container run i sh -c true", "x run i -- sh -c true"),
            ("x container prune -f", "x container prune -f"),
            ("x container image ls", "x container image ls"),
            // As they were.
            ("x run i", "x run i"),
            ("x run i -- sh -c true", "x run i -- sh -c true"),
            ("x run -- i sh", "x run -- i sh"),
            ("x run --nonesuch i -d", "x run --nonesuch i -d"),
            ("x rm -f c -v", "x rm -f c -v"),
            ("x nonesuch -f", "x nonesuch -f"),
            ("x", "x"),
        ] {
            assert_eq!(after(line), prepared, "{line}");
        }
    }

    #[test]
    fn switches_are_on_or_off_as_docker_has_them() {
        assert_eq!(after("x run --rm=true -i=false -t=1 i sh"), "x run --rm -t i -- sh");
        assert_eq!(after("x run --rm --rm=false i"), "x run i");
        assert_eq!(after("x run --rm=maybe i"), "x run --rm=maybe i");
        assert_eq!(after("x run --rm=false --name=true i"), "x run --name=true i");
    }
}
