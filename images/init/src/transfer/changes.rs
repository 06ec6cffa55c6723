//! The names of what a container has changed of its image, as docker's `diff` tells them: a letter,
//! a path and a zero byte each. A file that only was opened for writing has not changed, and of a
//! directory that has gone its name is told alone.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use exocell_agent::{AUTHORITY_FOLDER, FRAME_BYTES_MAX, FrameWriter, Kind};

use super::layer::{self, LEFT_OUT, Layer};
use super::{DEPTH_MAX, DataWriter, NAMES_BYTES_MAX, is_kernel_tree, names_in, open};
use crate::error::{Context, InitError};
use crate::own_proc;

const ADDED: u8 = b'A';
const CHANGED: u8 = b'C';
const REMOVED: u8 = b'D';
/// Directories that are there for init's own files: told where something else is in them.
const OWN: [&str; 3] = ["/etc", "/run", "/run/exocell"];

/// What a container is made of.
pub struct Layers {
    /// What it has changed.
    pub upper: File,
    pub image: File,
}

/// Sends the names of what is in `layers`; those that a root has not which cannot be written are
/// none. This thread sees files as the container's programs do.
pub fn tell(stream: &File, layers: Option<Layers>) -> Result<(), InitError> {
    let tell = |Layers { upper, image }| {
        let out = BufWriter::with_capacity(FRAME_BYTES_MAX, DataWriter(FrameWriter::new(stream)));
        walk(out, upper, image, open(None, OsStr::new("/"))?)
    };
    layers.map_or(Ok(()), tell).context(|| "looking at what the cell has changed")?;
    Ok(FrameWriter::new(stream).write(Kind::DataEof, &[])?)
}

/// A directory that is being looked at.
struct Level {
    /// As it is now.
    directory: File,
    /// What the image has in its place, if that is a directory.
    image: Option<File>,
    /// What is left of it, the last first.
    names: Vec<OsString>,
    held_bytes: usize,
    /// Whether it is of the whole root, and not of what was changed.
    is_whole: bool,
    /// What it is told as once something in it is.
    kind: u8,
    is_told: bool,
}

impl Level {
    fn new(directory: File) -> Self {
        Self {
            directory,
            image: None,
            names: Vec::new(),
            held_bytes: 0,
            is_whole: false,
            kind: CHANGED,
            is_told: false,
        }
    }
}

struct Walk<W> {
    out: W,
    layer: Layer,
    /// From the outermost directory to the innermost.
    levels: Vec<Level>,
    path: PathBuf,
    held_bytes: usize,
}

fn walk(out: impl Write, upper: File, image: File, root: File) -> io::Result<()> {
    let layer = Layer::of_changes(upper.metadata()?.dev(), root, Vec::new())?;
    let path = PathBuf::from("/");
    let mut walk = Walk { out, layer, levels: Vec::new(), path, held_bytes: 0 };
    // The root itself is never told.
    walk.enter(Level { image: Some(image), is_told: true, ..Level::new(upper) })?;
    while walk.step()? {}
    walk.out.flush()
}

impl<W: Write> Walk<W> {
    /// Looks at one more entry; false when there is none.
    fn step(&mut self) -> io::Result<bool> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        let Some(name) = level.names.pop() else {
            self.held_bytes -= level.held_bytes;
            self.levels.pop();
            self.path.pop();
            return Ok(true);
        };
        // What has vanished since it was listed is skipped.
        let Ok(found) = open(Some(&level.directory), &name) else { return Ok(true) };
        let before = level.image.as_ref().and_then(|image| open(Some(image), &name).ok());
        self.path.push(&name);
        if is_hidden(&self.path) || !self.look(found, before)? {
            self.path.pop();
        }
        Ok(true)
    }

    /// Tells of what was found, where the image has `before`; whether it is a directory that is
    /// looked at next.
    fn look(&mut self, found: File, before: Option<File>) -> io::Result<bool> {
        let metadata = found.metadata()?;
        let was = before.as_ref().map(File::metadata).transpose()?;
        let is_whole = self.levels.last().is_some_and(|level| level.is_whole);
        if !is_whole && layer::is_removal(&metadata) {
            if was.is_some() {
                self.tell(REMOVED)?;
            }
            return Ok(false);
        }
        let kind = match &was {
            None => Some(ADDED),
            Some(was) => differs(&metadata, was).then_some(CHANGED),
        };
        let is_own = OWN.iter().any(|own| self.path == Path::new(own));
        let told = kind.filter(|kind| !(is_own && *kind == ADDED));
        if let Some(kind) = told {
            self.tell(kind)?;
        }
        if !metadata.is_dir() || (is_whole && metadata.dev() != self.layer.device(true)) {
            return Ok(false);
        }
        let image = before.filter(|_| was.is_some_and(|was| was.is_dir()));
        let level = Level {
            image,
            is_whole,
            kind: kind.unwrap_or(CHANGED),
            is_told: told.is_some(),
            ..Level::new(found)
        };
        self.enter(level)?;
        Ok(true)
    }

    /// Goes into a directory, which is called as [`Self::path`]; tells what is not in it any more.
    fn enter(&mut self, mut level: Level) -> io::Result<()> {
        let mut is_complete = level.is_whole;
        if !level.is_whole {
            let attributes = layer::attributes(&own_proc::reopen(&level.directory)?)?;
            is_complete = attributes.is_opaque;
            if attributes.is_moved
                && let Some(whole) = self.layer.in_root(&self.path)?
            {
                // What it holds lies under another name in the image.
                level = Level { directory: whole, is_whole: true, ..level };
                is_complete = true;
            }
        }
        let at = self.path.display().to_string();
        let too_much =
            || io::Error::other(format!("{at} is too large to be compared with the image"));
        if self.levels.len() >= DEPTH_MAX {
            return Err(too_much());
        }
        let room = NAMES_BYTES_MAX - self.held_bytes;
        (level.names, level.held_bytes) = names_in(&level.directory, room)?.ok_or_else(too_much)?;
        let mut gone = Vec::new();
        if let (true, Some(image)) = (is_complete, &level.image) {
            let room = room - level.held_bytes;
            (gone, _) = names_in(image, room)?.ok_or_else(too_much)?;
            let is_there =
                |name: &OsString| level.names.binary_search_by(|own| name.cmp(own)).is_ok();
            gone.retain(|name| !is_there(name));
        }
        self.held_bytes += level.held_bytes;
        self.levels.push(level);
        for name in gone.iter().rev() {
            self.path.push(name);
            let told = if is_hidden(&self.path) { Ok(()) } else { self.tell(REMOVED) };
            self.path.pop();
            told?;
        }
        Ok(())
    }

    /// Tells [`Self::path`], after the directories that it is in.
    fn tell(&mut self, kind: u8) -> io::Result<()> {
        for at in 1..self.levels.len() {
            if !std::mem::replace(&mut self.levels[at].is_told, true) {
                let path: PathBuf = self.path.components().take(at + 1).collect();
                say(&mut self.out, self.levels[at].kind, &path)?;
            }
        }
        say(&mut self.out, kind, &self.path)
    }
}

fn say(out: &mut impl Write, kind: u8, path: &Path) -> io::Result<()> {
    out.write_all(&[kind])?;
    out.write_all(path.as_os_str().as_bytes())?;
    out.write_all(&[0])
}

/// Whether what is there is another than what was; the content is not read.
fn differs(now: &Metadata, was: &Metadata) -> bool {
    let is_device = now.file_type().is_block_device() || now.file_type().is_char_device();
    let content = |it: &Metadata| (it.size(), it.mtime(), it.mtime_nsec());
    let rights = |it: &Metadata| (it.mode(), it.uid(), it.gid());
    rights(now) != rights(was)
        || is_device && now.rdev() != was.rdev()
        || !now.is_dir() && content(now) != content(was)
}

/// Whether it is of the kernel's or of init's making.
fn is_hidden(path: &Path) -> bool {
    is_kernel_tree(path)
        || path == Path::new(AUTHORITY_FOLDER)
        || LEFT_OUT.iter().any(|own| path == Path::new(own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn told(upper: &Path, image: &Path) -> Vec<String> {
        let open = |path: &Path| super::open(None, path.as_os_str()).unwrap();
        let mut out = Vec::new();
        walk(&mut out, open(upper), open(image), open(image)).unwrap();
        let records = out.split(|byte| *byte == 0).filter(|record| !record.is_empty());
        records.map(|record| String::from_utf8_lossy(record).into_owned()).collect()
    }

    #[test]
    fn what_differs_is_told_with_the_directories_that_it_is_in() {
        let place = tempfile::tempdir().unwrap();
        let (upper, image) = (place.path().join("upper"), place.path().join("image"));
        for folder in ["etc", "same/deep", "proc", "run/exocell/tls"] {
            fs::create_dir_all(upper.join(folder)).unwrap();
        }
        fs::create_dir_all(image.join("same/deep")).unwrap();
        fs::create_dir_all(image.join("other")).unwrap();
        assert_eq!(told(&upper, &image), [""; 0], "what is init's own is not told");
        for (root, file) in [(&image, "same/kept"), (&upper, "etc/hosts"), (&upper, "etc/own")] {
            fs::write(root.join(file), file).unwrap();
        }
        fs::write(upper.join("same/deep/new"), "").unwrap();
        fs::write(image.join("same/deep/was"), "1").unwrap();
        fs::write(upper.join("same/deep/was"), "22").unwrap();
        symlink("nowhere", upper.join("other")).unwrap();
        let expected = [
            "A/etc",
            "A/etc/own",
            "C/other",
            "C/same",
            "C/same/deep",
            "A/same/deep/new",
            "C/same/deep/was",
        ];
        assert_eq!(told(&upper, &image), expected);
    }
}
