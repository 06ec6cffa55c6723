use std::collections::BTreeMap;
use std::io::Seek;

use super::*;
use crate::erofs::{Content, Reader};
use crate::progress::Silent;
use crate::tar::{EntryKind, Extent, TarWriter};
use crate::tree::{Kind, Meta, Tree};

fn limits() -> ImportLimits {
    ImportLimits { disk_free_bytes: 0, ..ImportLimits::default() }
}

fn stack(layers: Vec<Layer>) -> Stack {
    Stack { layers, limits: limits(), store: PathBuf::from("/store") }
}

fn file() -> File {
    tempfile::tempfile().unwrap()
}

fn room() -> (Room, File) {
    let image = file();
    let kept = image.try_clone().unwrap();
    (Room { image, spool: file(), unpacked: None }, kept)
}

fn meta(mode: u16, id: u32) -> Meta {
    Meta { mode, uid: id, gid: id, ..Meta::default() }
}

/// An archive: a name that ends in a slash is a directory, `a -> b` a link.
fn tar(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = TarWriter::new(&mut bytes);
    for (name, content) in entries {
        let size = content.len() as u64;
        let (path, kind, mode) = match (name.split_once(" -> "), name.strip_suffix('/')) {
            (Some((from, to)), _) => (from, EntryKind::Symlink(to.into()), 0o777),
            (_, Some(name)) => (name, EntryKind::Directory, 0o750),
            _ => (*name, EntryKind::File { size, extents: vec![Extent::whole(size)] }, 0o640),
        };
        writer.entry(path.as_bytes(), &kind, &meta(mode, 7), &mut content.as_bytes()).unwrap();
    }
    writer.finish().unwrap();
    bytes
}

/// Files to copy from, or an image without a layer.
fn files(entries: &[(&str, &str)]) -> Rootfs {
    let (room, image) = room();
    take(&mut &*tar(entries), room, &stack(Vec::new()), &mut Silent).unwrap();
    Rootfs::of(vec![image]).unwrap()
}

fn kept(bytes: &[u8]) -> (Layer, File) {
    let mut to = file();
    let layer = keep(&mut { bytes }, &mut to, &limits()).unwrap();
    to.rewind().unwrap();
    (layer, to)
}

fn listed(image: &Rootfs) -> BTreeMap<String, String> {
    fn walk(
        tree: &Tree,
        image: &Rootfs,
        at: crate::tree::InodeId,
        path: &str,
        to: &mut BTreeMap<String, String>,
    ) {
        for (name, entry) in tree.children(at).into_iter().flatten() {
            let path = format!("{path}/{}", String::from_utf8_lossy(name));
            let inode = tree.inode(entry.inode);
            let Meta { mode, uid, gid, .. } = inode.meta;
            let shown = match &inode.kind {
                Kind::Directory(_) => "/".to_owned(),
                Kind::Symlink(target) => format!("-> {}", String::from_utf8_lossy(target)),
                Kind::File(data) => {
                    let mut text = String::new();
                    let whole = [Extent::whole(data.size)];
                    Content::new(image, data, &whole).read_to_string(&mut text).unwrap();
                    text
                }
                other => format!("{other:?}"),
            };
            to.insert(path.clone(), format!("{mode:o} {uid}:{gid} {shown}"));
            walk(tree, image, entry.inode, &path, to);
        }
    }
    let tree = Reader::new(image).unwrap().tree(&limits()).unwrap();
    let mut all = BTreeMap::new();
    walk(&tree, image, crate::tree::InodeId::ROOT, "", &mut all);
    all
}

const DOCUMENT: &str =
    r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;

/// The image that `layers` over `base` make.
fn composed(base: Option<&Rootfs>, layers: Vec<(Layer, File)>) -> Rootfs {
    let (room, image) = room();
    let (known, opened): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
    let clone = || base.map(|base| base.try_clone().unwrap());
    let files = Files { base: clone(), layers: opened };
    let (_, form) = compose(&stack(known), DOCUMENT, files, room, &mut Silent).unwrap();
    let mut all = match form {
        Form::Whole => Vec::new(),
        Form::Delta => clone().unwrap().into_parts().0,
    };
    all.push(image);
    Rootfs::of(all).unwrap()
}

fn job(sources: &[&str], to: &str) -> Copy {
    Copy {
        selection: Selection {
            sources: sources.iter().map(|source| (*source).to_owned()).collect(),
            ..Selection::default()
        },
        to: to.to_owned(),
        owner: None,
        mode: None,
        unpacks: false,
        time_s: 5,
    }
}

fn copied(job: &Copy, source: &Rootfs, base: &Rootfs) -> Result<BTreeMap<String, String>> {
    let mut to = file();
    let files = Files { base: Some(base.try_clone().unwrap()), layers: Vec::new() };
    let layer =
        match copy(job, Some(source), &stack(Vec::new()), files, room().0, &mut to, &mut Silent)? {
            Copied::Layer(layer) => layer,
            Copied::Nothing => return Ok(BTreeMap::new()),
        };
    to.rewind().unwrap();
    let image = composed(Some(base), vec![(layer, to)]);
    let before = listed(base);
    let mut after = listed(&image);
    after.retain(|name, what| before.get(name) != Some(what));
    Ok(after)
}

fn shown(of: &BTreeMap<String, String>) -> Vec<String> {
    of.iter().map(|(name, what)| format!("{name} {what}")).collect()
}

#[test]
fn layers_over_an_image_are_another_image() {
    let long = "x".repeat(9000);
    let base =
        files(&[("d/", ""), ("d/one", "1"), ("d/long", &long), ("gone", "g"), ("l -> d", "")]);
    let layer = kept(&tar(&[(".wh.gone", ""), ("d/two", "2"), ("d/one", "uno")]));
    let upper = kept(&tar(&[("d/three", &long)]));
    let image = composed(Some(&base), vec![layer, upper]);
    let all = listed(&image);
    let names: Vec<_> = all.keys().map(String::as_str).collect();
    assert_eq!(names, ["/d", "/d/long", "/d/one", "/d/three", "/d/two", "/l"]);
    assert_eq!(all["/d/one"], "640 7:7 uno");
    assert_eq!(all["/d/three"], format!("640 7:7 {long}"));
    // And again over that.
    let again = composed(Some(&image), vec![kept(&tar(&[("d/four", "4")]))]);
    let again = listed(&again);
    assert_eq!((again.len(), again["/d/long"].as_str()), (7, all["/d/long"].as_str()));
}

#[test]
fn a_layer_that_is_another_one_is_refused() {
    let (layer, mut to) = kept(&tar(&[("a", "1")]));
    let (other, _) = kept(&tar(&[("a", "2")]));
    to.rewind().unwrap();
    let files = Files { base: None, layers: vec![to] };
    let said = compose(
        &stack(vec![Layer { diff_id: other.diff_id, ..layer }]),
        DOCUMENT,
        files,
        room().0,
        &mut Silent,
    );
    assert!(matches!(said, Err(ImageError::DigestMismatch { .. })));
    assert!(keep(&mut &b"not an archive".repeat(90)[..], &mut file(), &limits()).is_err());
}

#[test]
fn files_go_where_docker_would_put_them() {
    let source = files(&[
        ("a.txt", "a"),
        ("b.txt", "b"),
        ("d/", ""),
        ("d/c", "c"),
        ("d/l -> /etc", ""),
        ("to -> a.txt", ""),
    ]);
    let base = files(&[
        ("app/", ""),
        ("usr/", ""),
        ("usr/lib/", ""),
        ("lib -> usr/lib", ""),
        ("file", "f"),
        ("out -> ../../..", ""),
    ]);
    let seen = |sources: &[&str], to: &str| {
        copied(&job(sources, to), &source, &base).map(|all| shown(&all))
    };
    let is = |sources: &[&str], to: &str, expected: &[&str]| {
        assert_eq!(seen(sources, to).unwrap(), expected, "{sources:?} {to}");
    };
    is(&["a.txt"], "/app", &["/app/a.txt 640 0:0 a"]);
    is(&["a.txt"], "/new", &["/new 640 0:0 a"]);
    is(&["a.txt"], "/new/", &["/new 755 0:0 /", "/new/a.txt 640 0:0 a"]);
    is(&["a.txt"], "/x/y", &["/x 755 0:0 /", "/x/y 640 0:0 a"]);
    is(&["*.txt"], "/app/", &["/app/a.txt 640 0:0 a", "/app/b.txt 640 0:0 b"]);
    is(&["d"], "/app", &["/app/c 640 0:0 c", "/app/l 777 0:0 -> /etc"]);
    is(
        &["d"],
        "/e/f",
        &["/e 755 0:0 /", "/e/f 750 0:0 /", "/e/f/c 640 0:0 c", "/e/f/l 777 0:0 -> /etc"],
    );
    // Links of the image lead within it, and links of the source within that.
    is(&["a.txt"], "/lib/", &["/usr/lib/a.txt 640 0:0 a"]);
    is(&["a.txt"], "/out/app/", &["/app/a.txt 640 0:0 a"]);
    is(&["a.txt"], "/../../app/", &["/app/a.txt 640 0:0 a"]);
    is(&["to"], "/app/", &["/app/to 640 0:0 a"]);
    is(&["d/l/passwd", "a.txt"][1..], "/file", &["/file 640 0:0 a"]);
    for (sources, to, said) in [
        (&["no"][..], "/app", "file does not exist"),
        (&["../a.txt"][..], "/app", ".."),
        (&["*.no"][..], "/app", "file does not exist"),
        (&["d/l/passwd"][..], "/app", "file does not exist"),
        (&["a.txt", "b.txt"][..], "/app", "end with a /"),
        (&["a.txt"][..], "/file/", "a file of the image"),
        (&["d"][..], "/file", "a file of the image"),
        (&["a.txt"][..], "/file/x", "not a directory"),
    ] {
        let error = seen(sources, to).unwrap_err().to_string();
        assert!(error.contains(said), "{sources:?} {to}: {error}");
    }
}

#[test]
fn owners_modes_and_documents_are_given() {
    let source = files(&[("a", "1"), (".wh.b", "2")]);
    let base = files(&[
        ("etc/", ""),
        ("etc/passwd", "root:x:0:0::/:\nme:x:9:10::/:\n"),
        ("etc/group", "we:x:11:\n"),
    ]);
    let with = |owner: &str, mode, keeps_owner, inline: &[(&str, &str)]| {
        let mut job = job(&["a"], "/n/");
        job.owner = Some(owner.to_owned()).filter(|owner| !owner.is_empty());
        (job.mode, job.selection.keeps_owner) = (mode, keeps_owner);
        let inline = inline.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        job.selection.inline = inline.collect();
        copied(&job, &source, &base).map(|all| shown(&all))
    };
    assert_eq!(with("me:we", None, false, &[]).unwrap(), ["/n 755 9:11 /", "/n/a 640 9:11 1"]);
    assert_eq!(with("me", None, false, &[]).unwrap()[1], "/n/a 640 9:9 1");
    assert_eq!(with("5:6", Some(0o4711), false, &[]).unwrap()[1], "/n/a 4711 5:6 1");
    assert_eq!(with("", None, true, &[]).unwrap(), ["/n 755 0:0 /", "/n/a 640 7:7 1"]);
    assert_eq!(with("", None, false, &[("EOF", "text")]).unwrap()[1], "/n/EOF 644 0:0 text");
    assert!(with("nobody", None, false, &[]).unwrap_err().to_string().contains("/etc/passwd"));
    let said = copied(&job(&[".wh.b"], "/"), &source, &base).unwrap_err();
    assert!(said.to_string().contains(".wh."), "{said}");
}

#[test]
fn an_archive_is_unpacked_into_the_image_alone() {
    let hard = {
        let mut bytes = Vec::new();
        let mut writer = TarWriter::new(&mut bytes);
        let kind = EntryKind::HardLink(b"e/f".to_vec());
        let whole = EntryKind::File { size: 1, extents: vec![Extent::whole(1)] };
        writer.entry(b"e/f", &whole, &meta(0o600, 3), &mut &b"f"[..]).unwrap();
        writer.entry(b"e/h", &kind, &meta(0o600, 3), &mut std::io::empty()).unwrap();
        writer.finish().unwrap();
        zstd::encode_all(&bytes[..], 1).unwrap()
    };
    let out = tar(&[("../x", "1")]);
    let (room, source) = room();
    let entries = [
        ("good.tar.zst", &hard),
        ("bad.tar", &out),
        ("no.txt", &b"x".to_vec()),
        ("x.bz2", &b"BZh9".to_vec()),
    ];
    let mut bytes = Vec::new();
    let mut writer = TarWriter::new(&mut bytes);
    for (name, content) in entries {
        let size = content.len() as u64;
        let kind = EntryKind::File { size, extents: vec![Extent::whole(size)] };
        writer.entry(name.as_bytes(), &kind, &meta(0o644, 1), &mut &content[..]).unwrap();
    }
    writer.finish().unwrap();
    take(&mut &bytes[..], room, &stack(Vec::new()), &mut Silent).unwrap();
    let source = Rootfs::of(vec![source]).unwrap();
    let base = files(&[("app/", "")]);
    let seen = |name: &str| {
        let job = Copy { unpacks: true, ..job(&[name], "/app/in") };
        copied(&job, &source, &base).map(|all| shown(&all))
    };
    let expected = [
        "/app/in 755 0:0 /",
        "/app/in/e 755 0:0 /",
        "/app/in/e/f 600 3:3 f",
        "/app/in/e/h 600 3:3 f",
    ];
    assert_eq!(seen("good.tar.zst").unwrap(), expected);
    assert!(seen("bad.tar").unwrap_err().to_string().contains(".."));
    assert_eq!(seen("no.txt").unwrap(), ["/app/in 644 0:0 x"]);
    assert!(seen("x.bz2").unwrap_err().to_string().contains("ADD unpacks"));
}

#[test]
fn what_is_hidden_is_not_there() {
    let source = files(&[("a", "1"), ("d/", ""), ("d/b", "2")]);
    let mut job = job(&["."], "/n");
    job.selection.hidden = vec!["d/b".to_owned(), "none/x".to_owned(), "a".to_owned()];
    let seen = copied(&job, &source, &files(&[])).unwrap();
    assert_eq!(shown(&seen), ["/n 755 0:0 /", "/n/d 750 0:0 /"]);
}

#[test]
fn a_digest_is_of_names_modes_and_contents() {
    let of = |entries: &[(&str, &str)], sources: &[&str]| {
        hash(&job(sources, "/").selection, Some(&files(entries)), &limits()).unwrap()
    };
    let first = of(&[("d/", ""), ("d/a", "1"), ("x", "")], &["d"]);
    assert_eq!(first, of(&[("y", ""), ("d/", ""), ("d/a", "1")], &["d"]));
    for entries in [
        &[("d/", ""), ("d/a", "2")][..],
        &[("d/", ""), ("d/b", "1")],
        &[("d/", ""), ("d/a/", "")],
        &[("d/", ""), ("d/a -> 1", "")],
    ] {
        assert_ne!(first, of(entries, &["d"]));
    }
}

#[test]
fn a_text_and_an_archive_come_out_of_files() {
    let source = files(&[
        ("Dockerfile -> real", ""),
        ("real", "FROM x"),
        ("d/", ""),
        ("out -> /../../real", ""),
    ]);
    let read = |path: &str, most| text(&source, path, most, &limits());
    assert_eq!(read("Dockerfile", 10).unwrap().as_deref(), Some("FROM x"));
    assert_eq!(read("out", 10).unwrap().as_deref(), Some("FROM x"));
    assert_eq!(read("no", 10).unwrap(), None);
    assert!(read("d", 10).is_err() && read("real", 5).is_err());
    let mut bytes = Vec::new();
    pack(&source, ".", &mut bytes, &limits()).unwrap();
    assert_eq!(::tar::Archive::new(&*bytes).entries().unwrap().count(), 4);
}

#[test]
fn an_image_that_is_damaged_is_refused() {
    use std::os::unix::fs::FileExt;
    let whole = files(&[("d/", ""), ("d/a", "1"), ("l -> d", "")]).into_parts().0.remove(0);
    let bytes = whole.metadata().unwrap().len();
    for at in 0..bytes {
        let broken = file();
        std::io::copy(
            &mut {
                (&whole).rewind().unwrap();
                &whole
            },
            &mut &broken,
        )
        .unwrap();
        let mut byte = [0];
        broken.read_exact_at(&mut byte, at).unwrap();
        if byte == [0] {
            continue;
        }
        broken.write_all_at(&[byte[0] ^ 0xff], at).unwrap();
        // It is read as something else, or it is an error.
        let read = || {
            let image = Rootfs::of(vec![broken.try_clone().unwrap()])?;
            Reader::new(&image).and_then(|mut reader| reader.tree(&limits()))
        };
        let _ = read();
        broken.set_len(at).unwrap();
        let _ = read();
    }
}
