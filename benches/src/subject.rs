//! What is compared, and how each of them runs a program of this machine.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use exocell_cell::intra::Intra;
use exocell_cell::pager::Mode;

use crate::exocell::{Exocell, patiently};
use crate::network::Lan;

/// Who may be measured beside us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// A process of the host.
    Native,
    /// bubblewrap: namespaces only.
    Bwrap,
    /// gVisor, a user-space kernel, on its systrap platform.
    Gvisor,
    /// A cell whose guest kernel has none of our patches but the one that boots it.
    StockUml,
    /// A cell with `--intra none`; only where it is asked for.
    ParaNone,
    /// A cell with `--intra mpk`; only where it is asked for.
    ParaMpk,
    /// A cell with `--pager eager`; only where it is asked for.
    ParaPager,
    /// A cell with `--pager credit`, which is the default; only where it is asked for.
    ParaCredit,
    /// A cell with `--pager off`; only where it is asked for.
    ParaOff,
    /// Nobody.
    None,
}

/// A guest kernel by its file, named in results by its label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestKernel {
    pub label: Option<String>,
    pub file: PathBuf,
}

impl FromStr for GuestKernel {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (label, file) = match text.split_once('=') {
            Some((label, file)) => (Some(label.to_owned()), file),
            None => (None, text),
        };
        Ok(Self { label, file: file.into() })
    }
}

/// A way to run a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    Native,
    Bwrap,
    Gvisor,
    /// A cell with this guest kernel file.
    StockUml(PathBuf),
    /// A `vm` cell on the `para` platform, guest processes in stubs.
    ParaAspace(Option<GuestKernel>),
    /// The same, guest processes beside the guest kernel: `none` or `mpk`.
    ParaFused(Intra),
    /// As [`Self::ParaAspace`], with a Pager.
    ParaPager(Mode),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native => f.write_str("native"),
            Self::Bwrap => f.write_str("bwrap"),
            Self::Gvisor => f.write_str("gvisor"),
            Self::StockUml(_) => f.write_str("stock-uml"),
            Self::ParaFused(intra) => write!(f, "para-{intra}"),
            Self::ParaPager(Mode::Credit) => f.write_str("para-credit"),
            Self::ParaPager(Mode::Off) => f.write_str("para-off"),
            Self::ParaPager(_) => f.write_str("para-pager"),
            Self::ParaAspace(None) => f.write_str("para-aspace"),
            Self::ParaAspace(Some(kernel)) => match &kernel.label {
                None => f.write_str("para-aspace"),
                Some(label) => write!(f, "para-aspace+{label}"),
            },
        }
    }
}

/// The subjects of a run, ours last. A peer that this machine lacks is said on
/// standard error and left out.
pub fn subjects(peers: &[Peer], kernels: &[GuestKernel], exocell: &Exocell) -> Vec<Subject> {
    let all = [Peer::Native, Peer::Bwrap, Peer::Gvisor, Peer::StockUml];
    let wanted = all.iter().filter(|peer| peers.is_empty() || peers.contains(peer));
    let mut found = Vec::new();
    for peer in wanted {
        match present(*peer, exocell) {
            Ok(subject) => found.push(subject),
            Err(why) => eprintln!("{} is left out: {why}", name(*peer)),
        }
    }
    if kernels.is_empty() {
        found.push(Subject::ParaAspace(None));
    }
    found.extend(kernels.iter().map(|kernel| Subject::ParaAspace(Some(kernel.clone()))));
    for peer in [Peer::ParaNone, Peer::ParaMpk, Peer::ParaPager, Peer::ParaCredit, Peer::ParaOff] {
        if peers.contains(&peer) {
            match present(peer, exocell) {
                Ok(subject) => found.push(subject),
                Err(why) => eprintln!("{} is left out: {why}", name(peer)),
            }
        }
    }
    found
}

fn name(peer: Peer) -> String {
    peer.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// A gVisor that cannot use a platform may hang instead of failing.
const PROBE_MAX: Duration = Duration::from_secs(20);

fn present(peer: Peer, exocell: &Exocell) -> Result<Subject, String> {
    let subject = match peer {
        Peer::Native | Peer::None => return Ok(Subject::Native),
        Peer::ParaNone => return Ok(Subject::ParaFused(Intra::None)),
        Peer::ParaMpk => {
            return Intra::Mpk.check().map(|()| Subject::ParaFused(Intra::Mpk));
        }
        Peer::ParaPager => return Ok(Subject::ParaPager(Mode::Eager)),
        Peer::ParaCredit => return Ok(Subject::ParaPager(Mode::Credit)),
        Peer::ParaOff => return Ok(Subject::ParaPager(Mode::Off)),
        Peer::Bwrap => Subject::Bwrap,
        Peer::Gvisor => Subject::Gvisor,
        Peer::StockUml => {
            let kernel = exocell.stock_kernel().map_err(|error| error.to_string())?;
            return Ok(Subject::StockUml(kernel));
        }
    };
    let start = Start { program: "true", ..Start::default() };
    let mut command = subject.command(exocell, &start);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match patiently(&mut command, PROBE_MAX) {
        Ok(()) => Ok(subject),
        Err(why) => Err(format!("{}: {why}; run scripts/setup --bench", shown(&command))),
    }
}

/// A command as one line, without its program's folder.
pub fn shown(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let line = words.join(" ");
    let program = words.first().and_then(|program| program.rfind('/'));
    line[program.map_or(0, |at| at + 1)..].to_owned()
}

/// What a subject is asked to run.
#[derive(Debug, Default)]
pub struct Start<'a> {
    /// The host folder of the program, which the subject may read; without one
    /// the program is the subject's own, found by its name.
    pub folder: Option<&'a Path>,
    pub program: &'a str,
    /// Other files than this machine's, with the folder's as [`FOLDER_IN_CELL`].
    pub root: Option<&'a Path>,
    pub arguments: &'a [&'a str],
    /// A cell's options of `exocell run`.
    pub cell: &'a [&'a str],
    /// The network that gVisor's netstack is on, with what it runs; without one it has none.
    pub lan: Option<&'a Lan>,
}

/// Where cells see the host folder of [`Start`].
const FOLDER_IN_CELL: &str = "/bench";

/// Size of a cell's /dev/shm, half of its memory, in which `apps` keeps all its files.
const SHARED_MEMORY_IN_CELL: &str = "512m";

/// The program where the folder is [`FOLDER_IN_CELL`].
fn within(start: &Start<'_>) -> OsString {
    format!("{FOLDER_IN_CELL}/{}", start.program).into()
}

impl Subject {
    /// Whether it is a cell.
    pub fn is_cell(&self) -> bool {
        matches!(
            self,
            Self::StockUml(_) | Self::ParaAspace(_) | Self::ParaFused(_) | Self::ParaPager(_)
        )
    }

    /// The guest kernel file, where it is not the built one.
    fn kernel(&self) -> Option<&Path> {
        match self {
            Self::StockUml(file) => Some(file),
            Self::ParaAspace(Some(kernel)) => Some(&kernel.file),
            _ => None,
        }
    }

    /// The command that runs `start`.
    pub fn command(&self, exocell: &Exocell, start: &Start<'_>) -> Command {
        let program: OsString = match start.folder {
            Some(folder) => folder.join(start.program).into(),
            None => start.program.into(),
        };
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let mut line = match self {
            Self::Native => match start.root {
                None => vec![program],
                // Another root, and nothing else that costs.
                Some(root) => [
                    vec!["bwrap".into(), "--bind".into(), root.into(), "/".into()],
                    words("--dev-bind /dev /dev --proc /proc --tmpfs /tmp --tmpfs /dev/shm"),
                    vec![within(start)],
                ]
                .concat(),
            },
            Self::Bwrap => [
                words("bwrap --unshare-all --die-with-parent --ro-bind"),
                vec![start.root.unwrap_or(Path::new("/")).into(), "/".into()],
                words("--dev /dev --proc /proc --tmpfs /tmp --tmpfs /dev/shm"),
                vec![start.root.map_or(program, |_| within(start))],
            ]
            .concat(),
            Self::Gvisor if let Some(lan) = start.lan => return lan.gvisor(),
            Self::Gvisor => {
                let sandbox = "runsc --rootless --network=none --ignore-cgroups --platform=systrap";
                let inside = match start.root {
                    None => vec![program],
                    Some(root) => {
                        [words("-cwd / -root"), vec![root.into(), within(start)]].concat()
                    }
                };
                [words(sandbox), words("do"), inside].concat()
            }
            Self::StockUml(_) | Self::ParaAspace(_) | Self::ParaFused(_) | Self::ParaPager(_) => {
                return self.cell(exocell, start);
            }
        };
        let mut command = Command::new(line.remove(0));
        command.args(line).args(start.arguments);
        command
    }

    fn cell(&self, exocell: &Exocell, start: &Start<'_>) -> Command {
        let mut command = exocell.command();
        command.args(["run", "--rm"]).args(start.cell);
        let intra = if let Self::ParaFused(intra) = self { *intra } else { Intra::Aspace };
        command.args(["--intra", intra.name()]);
        // What programs work in; the others have a host's, half of the memory.
        command.args(["--shm-size", SHARED_MEMORY_IN_CELL]);
        match self {
            Self::ParaPager(mode) => drop(command.args(["--pager", mode.name()])),
            // Its kernel has none.
            Self::StockUml(_) => drop(command.args(["--pager", Mode::Off.name()])),
            _ => {}
        }
        if let Some(folder) = start.folder {
            command.arg("--volume").arg(format!("{}:{FOLDER_IN_CELL}:ro", folder.display()));
            command.arg(&exocell.image).arg(within(start));
        } else {
            command.args([&exocell.image, start.program]);
        }
        command.args(start.arguments);
        if let Some(kernel) = self.kernel() {
            command.env(exocell_cell::plan::kernel::KERNEL_VARIABLE, kernel);
        }
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_may_have_a_label_that_names_the_subject() {
        let named: GuestKernel = "new=/k/linux".parse().unwrap();
        assert_eq!(
            (named.label.as_deref(), named.file.as_path()),
            (Some("new"), Path::new("/k/linux"))
        );
        assert_eq!(Subject::ParaAspace(Some(named)).to_string(), "para-aspace+new");
        let plain: GuestKernel = "/k/linux".parse().unwrap();
        assert_eq!(Subject::ParaAspace(Some(plain)).to_string(), "para-aspace");
    }

    #[test]
    fn another_root_holds_the_program_in_every_subject() {
        let exocell = Exocell::of("/bin/exocell".into(), Path::new("/state"), "image");
        let folder = Some(Path::new("/f"));
        let other = Start { folder, program: "p", root: Some(Path::new("/r")), ..Start::default() };
        let line = |subject: &Subject, start| shown(&subject.command(&exocell, start));
        let own = Start { folder, program: "p", ..Start::default() };
        assert_eq!(line(&Subject::Native, &own), "p");
        for subject in [Subject::Native, Subject::Bwrap, Subject::Gvisor] {
            let line = line(&subject, &other);
            assert!(line.contains("/r") && line.ends_with("/bench/p"), "{subject}: {line}");
        }
        let cell = line(&Subject::ParaAspace(None), &other);
        assert!(cell.contains("/f:/bench:ro image /bench/p"), "{cell}");
    }

    #[test]
    fn a_shown_command_has_no_folder_and_all_words() {
        assert_eq!(shown(Command::new("/usr/bin/x").args(["a", "/b/c"])), "x a /b/c");
    }
}
