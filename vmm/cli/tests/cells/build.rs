//! `exocell build`: Dockerfiles become images, and what builders mean ill with becomes none.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{Finished, Started, code, eventually, exocell, finish, given, small, text};

/// A state root of the test's own, with a small image, and a context.
struct Bench {
    root: tempfile::TempDir,
    context: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self {
            root: tempfile::tempdir().expect("a state root"),
            context: tempfile::tempdir().expect("a context"),
        };
        let tree = small::tree();
        bench.run(&["image", "import", &format!("{}/", text(tree.path())), "--tag", "small"]).ok();
        bench
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = exocell(["--root", text(self.root.path())]);
        command.args(args).env("EXOCELL_KERNEL", given("EXOCELL_TEST_KERNEL"));
        command
    }

    #[track_caller]
    fn run(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args), b"")
    }

    fn file(&self, name: &str, content: &str) {
        let path = self.context.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        fs::write(path, content).expect("a file");
    }

    /// Builds the context with this Dockerfile.
    #[track_caller]
    fn build(&self, flags: &[&str], dockerfile: &str) -> Finished {
        self.file("Dockerfile", dockerfile);
        let fixed = ["build", "-m", "256m", "--disk", "256m"];
        self.run(&[&fixed[..], flags, &[text(self.context.path())]].concat())
    }

    /// Runs a program of `image` to its end.
    #[track_caller]
    fn shell(&self, image: &str, script: &str) -> Finished {
        self.run(&["run", "--rm", "-m", "256m", "--entrypoint", "", image, "sh", "-c", script])
    }

    fn list(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.path().join(folder)).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| !name.starts_with('.')).collect()
    }

    fn cells(&self) -> Vec<String> {
        self.list("cells")
    }
}

#[test]
fn a_dockerfile_becomes_an_image_and_is_not_built_twice() {
    let bench = Bench::new();
    bench.file("a.txt", "of a\n");
    let dockerfile = "ARG FROM=small\nFROM $FROM AS last\nARG V=1\nENV A=${V}x B=\"two words\"\n\
        WORKDIR /srv/here\nCOPY a.txt ./\nRUN cat a.txt > out && echo \"$A $V $B\" >> out && rm /bin/ls\n\
        LABEL l=v\nEXPOSE 80 53/udp\nVOLUME /data\nSTOPSIGNAL INT\nUSER 7:8\n\
        HEALTHCHECK --interval=5s CMD true\nENTRYPOINT [\"sh\", \"-c\"]\nCMD [\"cat out; pwd\"]\n";
    let flags = ["-t", "first:1", "--build-arg", "V=2", "--label", "own=1"];
    let first = bench.build(&flags, dockerfile).ok();
    let id = first.text().to_owned();
    assert!(
        id.starts_with("sha256:") && first.stderr.contains("Step 15/15 : LABEL"),
        "{}",
        first.stderr
    );
    assert!(!first.stderr.contains("Using cache"), "{}", first.stderr);
    let said = bench.run(&["run", "--rm", "-m", "256m", "first:1"]).ok();
    assert_eq!(said.text(), "of a\n2x 2 two words\n/srv/here");
    let image = bench.run(&["image", "inspect", "first:1"]).ok().json();
    let image = if image.is_array() { image[0].clone() } else { image };
    let config = &image["config"];
    assert_eq!(
        (&config["User"], &config["WorkingDir"]),
        (&"7:8".into(), &"/srv/here".into()),
        "{image}"
    );
    assert_eq!(config["Labels"], serde_json::json!({ "l": "v", "own": "1" }));
    assert_eq!(config["ExposedPorts"], serde_json::json!({ "80/tcp": {}, "53/udp": {} }));
    assert_eq!(config["Healthcheck"]["Interval"], 5_000_000_000_u64);
    // The directory, the copy and the command: a layer each.
    assert_eq!(image["rootfs"]["diff_ids"].as_array().map(Vec::len), Some(1 + 3), "{image}");
    bench.shell("first:1", "test -e /bin/ls").exited(1);

    let again = bench.build(&flags, dockerfile).ok();
    assert_eq!(again.text(), id);
    assert!(again.stderr.contains("Using cache") && !again.stderr.contains("Running in"));
    // Another argument is another command, another file another copy.
    let other = bench.build(&["--build-arg", "V=3"], dockerfile).ok();
    assert!(other.text() != id && other.stderr.contains("Running in"), "{}", other.stderr);
    bench.file("a.txt", "of b\n");
    let other = bench.build(&flags, dockerfile).ok();
    assert!(other.stderr.contains("Running in") && other.stderr.contains("Using cache"));
    bench.file("a.txt", "of a\n");
    let anew = bench.build(&["--no-cache", "-q"], dockerfile).ok();
    assert!(anew.stderr.is_empty() && anew.text() != id, "{}", anew.stderr);
    assert_eq!((bench.cells().len(), bench.list("builds/work").len()), (0, 0));
    // Nothing that was made on the way is an image.
    let images = bench.run(&["image", "ls", "-q"]).ok().text().lines().count();
    assert_eq!(images, 1 + 4);
}

/// Bytes on the disk of all that lies below a folder.
fn taken(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |path: &Path| fs::symlink_metadata(path).map_or(0, |it| it.blocks() * 512);
    entries
        .map(
            |entry| if entry.path().is_dir() { taken(&entry.path()) } else { bytes(&entry.path()) },
        )
        .sum()
}

#[test]
fn steps_take_disk_for_what_they_change() {
    let bench = Bench::new();
    let images = bench.root.path().join("images");
    // More than all that the steps change.
    let large: String = (0..1 << 20)
        .map(|at: u32| char::from(b' ' + (at.wrapping_mul(2_654_435_761) >> 25) as u8 % 90))
        .collect();
    bench.file("large", &large);
    bench.build(&["-t", "large"], "FROM small\nCOPY large /large\n").ok();
    let before = taken(&images);
    bench.file("d/f", "of the context");
    let dockerfile = "FROM large\nRUN echo 1 > /data/one && ln /data/one /data/link\n\
        COPY d /opt/d\nRUN rm /data/one /opt/d/f && echo 3 > /opt/d/g\n\
        RUN rm -r /opt/d && echo file > /opt/d\n\
        RUN rm /opt/d && ln -s ../data /opt/d && chmod 4711 /bin/true\n\
        RUN echo 5 > /opt/d/five\n";
    bench.build(&["-t", "steps"], dockerfile).ok();
    let more = taken(&images) - before;
    assert!(more < 512 << 10, "{more} more");
    let script = "cat /data/link /opt/d/five; ls /data; test ! -e /data/one && \
                  stat -c '%a %h' /bin/true /data/link && stat -c %s /large";
    let expected = "1\n5\nfive\nlink\n4711 1\n644 1\n1048576";
    assert_eq!(bench.shell("steps", script).ok().text(), expected);
    // What it is over stays for it, and goes with it.
    bench.run(&["image", "rm", "large"]).ok();
    bench.run(&["image", "rm", "small"]).ok();
    bench.shell("steps", "cat /data/link").ok();
    let rows = bench.run(&["image", "ls", "-q"]).ok().text().lines().count();
    assert_eq!(rows, 1);
    // An archive of it holds the same.
    let archive = bench.root.path().join("steps.tar");
    bench.run(&["image", "save", "-o", text(&archive), "steps"]).ok();
    bench.run(&["image", "rm", "steps"]).ok();
    assert_eq!(bench.list("images/blobs/sha256"), [""; 0]);
    bench.run(&["image", "load", "-i", text(&archive)]).ok();
    assert_eq!(bench.shell("steps", script).ok().text(), expected);
}

#[test]
fn files_come_from_the_context_and_from_stages() {
    let bench = Bench::new();
    for (name, content) in [
        ("src/one.c", "1"),
        ("src/two.c", "2"),
        ("src/deep/three", "3"),
        ("out/left", "x"),
        ("keep.md", "k"),
        ("drop.md", "d"),
        (".dockerignore", "*.md\n!keep.md\nout\n**/deep\n"),
    ] {
        bench.file(name, content);
    }
    symlink("/etc/shadow", bench.context.path().join("outside")).expect("a link");
    let dockerfile = "FROM small AS one\nCOPY src/*.c /c/\nRUN echo made > /c/made && chmod 4711 /c/made\n\
        FROM scratch AS unused\nCOPY nothing /\nFROM small\nCOPY --from=one --chmod=640 /c/made /c/one.c /got/\n\
        COPY --from=small /bin/true /got/\nCOPY --chown=3:4 . /all/\nCOPY <<EOF <<\"RAW\" /text/\n\
        $A of a document\nEOF\n$A\nRAW\nADD packed.tar /packed\n";
    let mut packed = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o600);
    header.set_uid(9);
    packed.append_data(&mut header, "d/f", &b"tar\n"[..]).expect("an archive");
    fs::write(bench.context.path().join("packed.tar"), packed.into_inner().expect("an archive"))
        .expect("a file");
    let built = bench.build(&["-t", "copies"], dockerfile).ok();
    assert!(!built.stderr.contains("nothing"), "a stage that nobody needs: {}", built.stderr);
    let script = "stat -c '%n %a %u:%g' /got/* /all/* /all/src/* /packed/d/f; cat /text/EOF /text/RAW; \
                  ls -d /all/out /all/drop.md /all/src/deep";
    let seen = bench.shell("copies", script);
    let expected = "/got/made 640 0:0\n/got/one.c 640 0:0\n/got/true 755 0:0\n/all/Dockerfile 644 3:4\n\
        /all/keep.md 644 3:4\n/all/outside 777 3:4\n/all/packed.tar 644 3:4\n/all/src 755 3:4\n\
        /all/src/one.c 644 3:4\n/all/src/two.c 644 3:4\n/packed/d/f 600 9:0\n of a document\n$A";
    assert_eq!(seen.text(), expected, "{}", seen.stderr);
    assert_eq!(seen.stderr.matches("No such file").count(), 3, "{}", seen.stderr);
    bench.shell("copies", "cat /all/outside").exited(1);
}

#[test]
fn what_is_copied_from_a_stage_follows_the_stage() {
    let bench = Bench::new();
    let dockerfile = "FROM small AS one\nCOPY word /word\nFROM small\nCOPY --from=one /word /got\n";
    for (word, cached) in [("first", 0), ("first", 2), ("other", 0), ("first", 2), ("other", 2)] {
        bench.file("word", word);
        let built = bench.build(&["-t", "follows"], dockerfile).ok();
        let told = format!("{}{}", built.text(), built.stderr);
        assert_eq!(told.matches("Using cache").count(), cached, "{word}: {told}");
        assert_eq!(bench.shell("follows", "cat /got").text(), word);
    }
}

#[test]
fn secrets_caches_and_memory_leave_nothing_in_the_image() {
    let bench = Bench::new();
    bench.file("in/script", "from the context");
    let key = bench.root.path().join("key");
    fs::write(&key, "hunter-of-secrets").expect("a file");
    let secret = format!("id=k,src={}", text(&key));
    let dockerfile = "FROM small\n\
        RUN --mount=type=secret,id=k --mount=type=secret,id=k,target=/key \\\n\
          test -s /run/secrets/k && test \"$(cat /run/secrets/k)\" = \"$(cat /key)\" && \
          stat -c '%a %u' /run/secrets/k > /mode\n\
        RUN --mount=type=secret,id=k,mode=0440,uid=7,gid=8 \
          stat -c '%a %u:%g' /run/secrets/k >> /mode\n\
        RUN --mount=type=tmpfs,target=/mem echo x > /mem/x\n\
        RUN --mount=type=cache,target=/cache echo run >> /cache/log && cat /cache/log > /log\n\
        RUN --mount=type=bind,source=in,target=/in cat /in/script > /script\n\
        RUN <<EOF\necho first > /doc\necho second >> /doc\nEOF\n\
        RUN <<EOF\n#!/bin/sh\necho \"by $0\" > /by\nEOF\n";
    let built = bench.build(&["-t", "mounts", "--secret", &secret], dockerfile).ok();
    let seen =
        bench.shell("mounts", "cat /mode /log /script /doc /by; ls /mem /cache /in; cat /key");
    assert!(
        seen.text().starts_with("400 0\n440 7:8\nrun\nfrom the contextfirst\nsecond\nby /dev/"),
        "{}",
        seen.text()
    );
    assert!(!seen.text().contains("hunter"), "{}", seen.text());
    // It is in no file that the build has left.
    for folder in ["builds/cache", "builds/layers", "images/blobs/sha256"] {
        for name in bench.list(folder) {
            let bytes = fs::read(bench.root.path().join(folder).join(name)).expect("a file");
            let packed = bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
            assert!(packed || !bytes.windows(6).any(|part| part == b"hunter"), "{folder}");
        }
    }
    // Another value changes nothing; the cache was kept.
    fs::write(&key, "hunter-of-secrets-too").expect("a file");
    let again = bench.build(&["--secret", &secret], dockerfile).ok();
    assert_eq!(again.text(), built.text());
    let anew = ["-t", "mounts:2", "--no-cache", "--secret", &secret];
    bench.build(&anew, dockerfile).ok();
    assert_eq!(bench.shell("mounts:2", "cat /log").ok().text(), "run\nrun");
}

#[test]
fn what_cannot_be_built_is_told_with_its_line() {
    let bench = Bench::new();
    bench.file("a", "1");
    for (dockerfile, exit, words) in [
        ("FROM small\nRUN exit 7", 1, &["returned a non-zero code: 7"][..]),
        ("FROM small\nRUN [\"/no/such\"]", 1, &["line 2", "/no/such"]),
        ("FROM small\nCOPY none /", 125, &["build context", "stat none: file does not exist"]),
        ("FROM small\nCOPY ../a /", 1, &["line 2", "../a", "outside the build context"]),
        ("FROM small\nCOPY a /bin/sh/", 125, &["/bin/sh/"]),
        (
            "FROM small\nCOPY --from=later a /",
            1,
            &["invalid from flag value later", "neither a stage", "nor an image"],
        ),
        ("FROM no/such:image", 125, &["no/such"]),
        ("FROM --platform=linux/arm64 small", 1, &["arm64"]),
        ("FROM small\nADD https://example.org/x /x", 1, &["line 2", "https://example.org/x"]),
        (
            "FROM small\nRUN --mount=type=secret,id=k,required cat /run/secrets/k",
            1,
            &["--secret id=k"],
        ),
        ("FROM small\nNOPE", 1, &["line 2", "NOPE"]),
        ("", 1, &["FROM"]),
    ] {
        bench.build(&[], dockerfile).exited(exit).complains_of(words);
    }
    bench.build(&["--target", "none"], "FROM small").exited(1).complains_of(&["none"]);
    let long = format!("FROM small\n#{}", "x".repeat(1 << 20));
    bench.build(&[], &long).exited(125).complains_of(&["Dockerfile"]);
    assert!(bench.cells().is_empty() && bench.list("builds/work").is_empty());
    // A directory whose links lead out is no way to the host's files.
    let other = tempfile::tempdir().expect("a folder");
    symlink("/etc", other.path().join("etc")).expect("a link");
    bench.build(&["-f", "/dev/null"], "").exited(1).complains_of(&["FROM"]);
    let mut command = bench.command(&["build", "-f", "-", text(other.path())]);
    let refused = finish(&mut command, b"FROM small\nCOPY etc/passwd /");
    refused.exited(125).complains_of(&["etc/passwd"]);
}

#[test]
fn a_build_reads_standard_input_and_the_network_is_granted() {
    let bench = Bench::new();
    let id = bench.root.path().join("id");
    let plain = finish(
        &mut bench.command(&["build", "-q", "--iidfile", text(&id), "-"]),
        b"FROM small\nRUN test -z \"$(ls /sys/class/net | grep eth)\"\n",
    );
    // The image has no grep: what is asked is that it runs without a context.
    let plain = plain.ok();
    assert_eq!(fs::read_to_string(&id).expect("the id"), plain.text());
    let mut packed = tar::Builder::new(Vec::new());
    for (name, content) in [("d/Dockerfile", "FROM small\nCOPY x /x\n"), ("x", "y\n")] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        packed.append_data(&mut header, name, content.as_bytes()).expect("an archive");
    }
    let archive = packed.into_inner().expect("an archive");
    let mut command = bench.command(&["build", "-t", "piped", "-f", "d/Dockerfile", "-"]);
    finish(&mut command, &archive).ok();
    assert_eq!(bench.shell("piped", "cat /x").ok().text(), "y");
    let refused = finish(&mut bench.command(&["build", "-"]), b"FROM small\nCOPY a /\n");
    refused.exited(1).complains_of(&["no context"]);
}

#[test]
fn images_have_instructions_for_whoever_builds_on_them() {
    let bench = Bench::new();
    bench.file("a", "1");
    bench
        .build(
            &["-t", "parent"],
            "FROM small\nONBUILD COPY a /from-child\nONBUILD RUN cat /from-child > /ran",
        )
        .ok();
    bench.shell("parent", "test -e /from-child").exited(1);
    let built = bench
        .build(&["-t", "child"], "FROM parent\nSHELL [\"sh\", \"-ec\"]\nRUN false; true")
        .exited(1);
    assert!(built.stderr.contains("2 build triggers"), "{}", built.stderr);
    bench.build(&["-t", "child"], "FROM parent").ok();
    assert_eq!(bench.shell("child", "cat /ran").ok().text(), "1");
    bench.build(&["-t", "grandchild"], "FROM child").ok();
}

/// A build that waits in a command.
fn waiting(bench: &Bench) -> Started {
    bench.file("Dockerfile", "FROM small\nRUN sleep 600\n");
    let started =
        Started::new(&mut bench.command(&["build", "-m", "256m", text(bench.context.path())]));
    eventually("the command's cell runs", || {
        bench.run(&["ps", "-q"]).ok().text().lines().count() == 1
    });
    started
}

#[test]
fn a_build_that_is_interrupted_leaves_nothing() {
    let bench = Bench::new();
    let mut build = waiting(&bench);
    kill(Pid::from_raw(build.child.id() as i32), Signal::SIGINT).expect("kill");
    assert_eq!(code(build.child.wait().expect("wait")), 130);
    assert!(bench.cells().is_empty() && bench.list("builds/work").is_empty());
}

#[test]
fn a_build_ends_no_cell_that_is_tied_to_somebody_else() {
    let bench = Bench::new();
    let flags = ["run", "-i", "--tied", "--name", "anothers", "-m", "256m", "small", "cat"];
    let _tied = Started::new(&mut bench.command(&flags));
    let runs = || bench.run(&["exec", "anothers", "true"]).code == 0;
    eventually("the tied cell runs", runs);
    bench.build(&["-t", "next"], "FROM small\nRUN true").ok();
    assert!(runs());
}

#[test]
fn a_killed_builds_cell_ends_with_it_and_its_files_go_with_the_next() {
    let bench = Bench::new();
    let mut build = waiting(&bench);
    let label = ["--label", "exocell.build=mine", "-m", "256m"];
    let sleeping = [&["run", "-d"], &label[..], &["small", "sleep", "600"]].concat();
    let own = bench.run(&sleeping).ok().text().to_owned();
    build.child.kill().expect("kill");
    build.child.wait().expect("wait");
    eventually("the step's cell has ended", || bench.cells() == std::slice::from_ref(&own));
    assert!(!bench.list("builds/work").is_empty());
    bench.build(&["-t", "next"], "FROM small\nRUN true").ok();
    assert_eq!(
        bench.cells(),
        std::slice::from_ref(&own),
        "a cell with that label is its operator's"
    );
    bench.run(&["rm", "-f", &own]).ok();
    assert!(bench.list("builds/work").is_empty());
    assert!(Path::new(&bench.root.path().join("builds/cache")).is_dir());
}
