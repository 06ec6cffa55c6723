//! Applications: sqlite, git, Python, gcc and tar, on data in memory.
//!
//! Every subject runs the programs of the same image: cells from the image itself,
//! the others from a copy of its files that is made once.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::BenchError;
use crate::exocell::Exocell;
use crate::options::AppsArgs;
use crate::row::Row;
use crate::scratch::Scratch;
use crate::subject::{self, Start, Subject};
use crate::turns::{Run, Setting, choose, listed, may_be_realtime};

const PROGRAM: &str = "apps.py";
const SCRIPT: &str = include_str!("../apps/apps.py");
const MEMORY: &str = "1g";
/// What no application reads, and what a kernel makes.
const LEFT_OUT: [&str; 7] =
    ["proc", "sys", "dev", "boot", "usr/share/doc", "usr/share/man", "usr/share/locale"];

/// Measures what `args` ask for; rows in the order of the program's list.
pub fn measure(args: &AppsArgs, exocell: &Exocell) -> Result<Vec<Row>, BenchError> {
    let root = prepare(exocell)?;
    let folder = root.join("bench");
    let wanted = choose(listed(list(exocell, &root, &folder))?, &args.only)?;
    let subjects = subject::subjects(&args.options.peers, &args.options.kernel, exocell);
    let setting = Setting {
        cpus: 1,
        realtime: !args.fair && may_be_realtime(),
        memory: MEMORY,
        samples: 1,
        program: PROGRAM,
        folder: &folder,
        root: Some(&root),
        arguments: &["serve"],
        cell: &[],
        lan: None,
        exocell,
    };
    let mut run = Run::new(&subjects, wanted, setting);
    for round in 0..args.options.rounds as usize {
        run.round(round);
    }
    Ok(run.rows())
}

fn list(exocell: &Exocell, root: &Path, folder: &Path) -> Command {
    let start = Start {
        folder: Some(folder),
        root: Some(root),
        program: PROGRAM,
        arguments: &["list"],
        ..Start::default()
    };
    Subject::Native.command(exocell, &start)
}

/// The image's files, kept by the image's hash, with the program in `/bench`.
fn prepare(exocell: &Exocell) -> Result<PathBuf, BenchError> {
    let image = exocell.call(&["image", "inspect", &exocell.image])?;
    let hash = Sha256::digest(&image);
    let name: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let cache = exocell.cache();
    let root = cache.join(format!("files-{name}"));
    if !root.exists() {
        eprintln!("copying the files of {}, once", exocell.image);
        let work = Scratch::new(&cache)?;
        copy_files(exocell, work.path())?;
        publish(work.path(), &root).map_err(BenchError::host(root.display()))?;
    }
    let program = root.join("bench").join(PROGRAM);
    fs::write(&program, SCRIPT)
        .and_then(|()| fs::set_permissions(&program, fs::Permissions::from_mode(0o755)))
        .map_err(BenchError::host(program.display()))?;
    Ok(root)
}

/// Adds the folders that subjects mount on, and moves the files to their place.
fn publish(work: &Path, root: &Path) -> std::io::Result<()> {
    for made in ["proc", "sys", "dev", "bench", "tmp"] {
        fs::create_dir_all(work.join(made))?;
    }
    fs::set_permissions(work, fs::Permissions::from_mode(0o755))?;
    fs::rename(work, root)
}

/// tar in a cell writes, tar here reads.
fn copy_files(exocell: &Exocell, to: &Path) -> Result<(), BenchError> {
    let mut writer = exocell.with(&["run", "--rm", &exocell.image]);
    writer.args(["tar", "-C", "/", "--one-file-system", "-cf", "-"]);
    writer.args(LEFT_OUT.map(|name| format!("--exclude=./{name}"))).arg(".");
    let failed = |why: String| BenchError::Subject { subject: "the image's files".into(), why };
    let mut writer = writer
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(BenchError::host("exocell run"))?;
    let mut reader = Command::new("tar");
    reader.args(["--no-same-owner", "-xf", "-", "-C"]).arg(to);
    if let Some(stream) = writer.stdout.take() {
        reader.stdin(stream);
    }
    let read = reader.status().map_err(BenchError::host("tar"))?;
    let written = writer.wait().map_err(BenchError::host("exocell run"))?;
    match read.success() && written.success() {
        true => Ok(()),
        false => Err(failed(format!("tar here: {read}, in the cell: {written}"))),
    }
}
