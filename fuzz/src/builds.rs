//! Builds: Dockerfiles, what contexts leave out, and trees that files are copied from and to.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use exocell_images::build::Room;
use exocell_images::compose::{self, Copy, Files, Selection, Stack};
use exocell_images::dockerfile::ignore::Ignore;
use exocell_images::dockerfile::{self, Instruction, Scope};
use exocell_images::{ImportLimits, Rootfs, Silent};

fn limits() -> ImportLimits {
    ImportLimits {
        bytes_max: 4 << 20,
        apparent_bytes_max: 64 << 20,
        entries_max: 1000,
        disk_free_bytes: 0,
        ..ImportLimits::default()
    }
}

/// A Dockerfile and its words, and the same text as `.dockerignore`.
pub fn text(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(ignore) = Ignore::read(&text) {
        for path in ["a", "a/b", "a/b/c.rs", "**", ""] {
            let _ = (ignore.leaves_out(path), ignore.leaves_out_all_below(path));
        }
    }
    let variables = |name: &str| name.len().is_multiple_of(2).then(|| format!("of {name}"));
    let scope = Scope { variables: &variables, escape: '\\' };
    for line in text.lines().take(64) {
        let _ = (scope.expand(line), scope.split(line), scope.fill(line));
        let _ = dockerfile::instruction(line);
    }
    let Ok(file) = dockerfile::read(&text) else { return };
    assert!(!file.stages.is_empty() && file.stages.len() <= dockerfile::STEPS_MAX);
    for step in file.stages.iter().flat_map(|stage| &stage.steps) {
        assert!(step.line > 0 && !step.text.is_empty());
        if let Instruction::OnBuild(text) = &step.instruction {
            dockerfile::instruction(text).expect("a trigger was looked at when it was read");
        }
    }
}

/// Dockerfiles with most of what they may have.
pub fn text_seeds() -> Vec<Vec<u8>> {
    let whole = "# escape=\\\nARG V=1\nFROM a:${V} AS b\nENV A=\"x y\" B=${A:-z}\n\
        RUN --mount=type=cache,target=/c --network=none <<EOF\n#!/bin/sh\necho $A\nEOF\n\
        COPY --from=0 --chown=1:2 [\"a b\", \"/c\"]\nADD x.tar *.c /d/\nHEALTHCHECK --retries=2 CMD x\n\
        ONBUILD RUN y\nSHELL [\"sh\", \"-c\"]\nEXPOSE 80-90/udp\nVOLUME /v\nUSER u\nWORKDIR /w\n\
        LABEL a=b\nSTOPSIGNAL 9\nENTRYPOINT [\"e\"]\nCMD c \\\n # comment\n d\n";
    let ignored = "# comment\n*.md\n!keep.md\n**/deep\na/[b-d]?/*\n";
    vec![whole.into(), ignored.into(), b"FROM scratch".to_vec()]
}

fn file() -> File {
    tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).expect("a file")
}

fn room() -> Room {
    Room { image: file(), spool: file(), unpacked: None }
}

/// An image's file system, to be copied from, copied to and built on.
pub fn tree(bytes: &[u8]) {
    let image = || {
        let mut image = file();
        image.write_all(bytes).expect("a file is written");
        Rootfs::of(vec![image]).expect("one file")
    };
    let delta = [image(), image()].into_iter().flat_map(|image| image.into_parts().0);
    if let Ok(rootfs) = Rootfs::of(delta.collect()) {
        let _ = compose::text(&rootfs, "d/l/f", 100, &limits());
    }
    let _ = compose::layer(&image(), Some(&image()), &mut file(), false, &limits());
    let stack = Stack { layers: Vec::new(), limits: limits(), store: PathBuf::from("/") };
    let selection = Selection { sources: vec!["*".to_owned()], ..Selection::default() };
    let _ = compose::hash(&selection, Some(&image()), &limits());
    let _ = compose::text(&image(), "d/l/f", 100, &limits());
    let copy = Copy {
        selection,
        to: "/d/l/".to_owned(),
        owner: Some("u:g".to_owned()),
        mode: None,
        unpacks: true,
        time_s: 0,
    };
    let files = || Files { base: Some(image()), layers: Vec::new() };
    let _ = compose::copy(&copy, Some(&image()), &stack, files(), room(), &mut file(), &mut Silent);
    let document =
        r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
    let _ = compose::compose(&stack, document, files(), room(), &mut Silent);
}

/// File systems as they are written here.
pub fn tree_seeds() -> Vec<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut add = |name: &str, kind, content: &[u8], link: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o755);
        match kind {
            tar::EntryType::Symlink => archive.append_link(&mut header, name, link),
            _ => archive.append_data(&mut header, name, content),
        }
        .expect("an archive in memory");
    };
    add("d", tar::EntryType::Directory, b"", "");
    add("d/f", tar::EntryType::Regular, b"content", "");
    add("d/l", tar::EntryType::Symlink, b"", "../e/..");
    add("etc/passwd", tar::EntryType::Regular, b"u:x:1:2::/:\n", "");
    add("etc/group", tar::EntryType::Regular, b"g:x:3:\n", "");
    let bytes = archive.into_inner().expect("an archive in memory");
    let (room, stack) =
        (room(), Stack { layers: Vec::new(), limits: limits(), store: PathBuf::from("/") });
    let mut image = room.image.try_clone().expect("a descriptor");
    compose::take(&mut &*bytes, room, &stack, &mut Silent).expect("files are taken");
    let mut whole = Vec::new();
    std::io::Seek::rewind(&mut image).expect("a file is read");
    std::io::Read::read_to_end(&mut image, &mut whole).expect("a file is read");
    vec![whole]
}
