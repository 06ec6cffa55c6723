//! Takes values out of this process's command line, which every user of the host can read
//! (proc(5), /proc/PID/cmdline), and which a cell's supervisor would have as long as the cell
//! lives.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use clap::Parser;
use exocell_cell::CellError;

use crate::args::{Cli, Command, ProcessArgs, RunArgs};

/// What stands where a value was.
const BLANK: u8 = b'*';

/// Blanks the values of secrets and of environments that `command` was given.
///
/// # Errors
/// The command line can't be changed; the message says how to hand values over without it.
pub fn values(command: &Command) -> Result<(), CellError> {
    let behind = match command {
        Command::Mcp(args) => of_flags(&args.flags),
        _ => None,
    };
    let given: Vec<&str> = match command {
        Command::Run(args) => of_run(args),
        Command::Pool(args) => of_run(&args.run),
        Command::Exec(args) => of_process(&args.process),
        Command::Mcp(_) => behind.as_ref().map_or_else(Vec::new, of_run),
        _ => return Ok(()),
    };
    let given: Vec<&str> = given.into_iter().filter(|text| text.contains('=')).collect();
    if given.is_empty() {
        return Ok(());
    }
    blank(&given).map_err(CellError::host(
        "cannot take values out of this command line, which others can read; give them by variables \
         instead (--secret NAME@HOST, -e NAME), or by a file (--env-file)",
    ))
}

/// Flags of `exocell run` that another command hands on. What is wrong with them, that says.
fn of_flags(flags: &[String]) -> Option<RunArgs> {
    let words = ["exocell", "run"].into_iter().chain(flags.iter().map(String::as_str));
    match Cli::try_parse_from(words.chain(["image"])).ok()?.command {
        Command::Run(run) => Some(*run),
        _ => None,
    }
}

fn of_run(args: &RunArgs) -> Vec<&str> {
    args.secret.iter().map(String::as_str).chain(of_process(&args.process)).collect()
}

fn of_process(args: &ProcessArgs) -> Vec<&str> {
    args.env.iter().map(String::as_str).collect()
}

/// The arguments lie where the kernel put them, and nobody looks at them again.
fn blank(given: &[&str]) -> io::Result<()> {
    let (start, end) = place()?;
    let memory = File::options().read(true).write(true).open("/proc/self/mem")?;
    let length = usize::try_from(end - start).map_err(|_| io::ErrorKind::InvalidData)?;
    let mut line = vec![0; length];
    memory.read_exact_at(&mut line, start)?;
    blank_in(&mut line, given);
    memory.write_all_at(&line, start)
}

/// From where to where the arguments are in this process's memory.
fn place() -> io::Result<(u64, u64)> {
    /// proc(5): arg_start and arg_end, counted behind the name, which may hold anything.
    const FIELDS: [usize; 2] = [45, 46];
    let line = fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = match line.rsplit_once(')') {
        Some((_, fields)) => fields.split_ascii_whitespace().collect(),
        None => Vec::new(),
    };
    let field = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok());
    match FIELDS.map(field) {
        [Some(start), Some(end)] if 0 < start && start < end => Ok((start, end)),
        _ => Err(io::Error::other("/proc/self/stat does not say where it is")),
    }
}

/// Blanks what follows the first `=` of each of `given`, in arguments that end with it.
fn blank_in(line: &mut [u8], given: &[&str]) {
    for argument in line.split_mut(|byte| *byte == 0) {
        for text in given {
            let name = text.find('=').map_or(text.len(), |equals| equals + 1);
            if argument.ends_with(text.as_bytes()) {
                let start = argument.len() - text.len() + name;
                argument[start..].fill(BLANK);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_blanked_however_they_were_given() {
        let mut line = *b"run\0--secret=K=abc@h.test\0-e\0A=1\0-eB=2=3\0img\0sh\0A=\0";
        blank_in(&mut line, &["K=abc@h.test", "A=1", "B=2=3"]);
        let expected = b"run\0--secret=K=**********\0-e\0A=*\0-eB=***\0img\0sh\0A=\0";
        assert_eq!(String::from_utf8_lossy(&line), String::from_utf8_lossy(expected));
    }

    #[test]
    fn what_is_behind_the_flags_of_a_server_is_found() {
        let flags = ["-m", "1g", "-eA=1", "--secret", "K=abc@h.test"].map(str::to_owned);
        assert_eq!(of_run(&of_flags(&flags).unwrap()), ["K=abc@h.test", "A=1"]);
        assert!(of_flags(&["--nonsense".to_owned()]).is_none());
    }

    #[test]
    fn the_place_of_the_arguments_is_found() {
        let (start, end) = place().unwrap();
        let length = fs::read("/proc/self/cmdline").unwrap().len() as u64;
        assert_eq!(end - start, length);
    }
}
