//! Builds by BuildKit's protocol: buildx and compose as Debian has them, and clients that mean no good.

mod client;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::common::docker::Server;
use crate::common::registry::Registry;
use crate::common::{Finished, Started, eventually, finish, text};

/// A client with buildx, and a directory to build from.
struct Client<'a> {
    server: &'a Server,
    config: tempfile::TempDir,
    context: tempfile::TempDir,
}

impl<'a> Client<'a> {
    /// None where there are no plugins.
    fn of(server: &'a Server) -> Option<Self> {
        let plugins = std::env::var_os("EXOCELL_TEST_PLUGINS").filter(|path| !path.is_empty());
        let Some(plugins) = plugins.map(PathBuf::from) else {
            eprintln!("no plugins of docker's are here: buildx is not tested");
            return None;
        };
        let [config, context] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let known = serde_json::json!({ "cliPluginsExtraDirs": [plugins] });
        fs::write(config.path().join("config.json"), known.to_string()).expect("a file");
        Some(Self { server, config, context })
    }

    fn file(&self, name: &str, content: &str) {
        let path = self.context.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, content).expect("a file");
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.server.command(args);
        command.env_remove("DOCKER_BUILDKIT").env("DOCKER_CONFIG", self.config.path());
        command.env("BUILDX_GIT_INFO", "false").current_dir(self.context.path());
        command
    }

    #[track_caller]
    fn docker(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args), b"")
    }

    /// Builds the directory; its steps are on standard error.
    #[track_caller]
    fn build(&self, flags: &[&str]) -> Finished {
        self.docker(&[&["build", "--progress=plain"], flags, &["."]].concat())
    }

    /// Runs `sh -c SCRIPT` in an image.
    #[track_caller]
    fn shell(&self, image: &str, script: &str) -> Finished {
        self.docker(&["run", "--rm", "--network", "none", image, "sh", "-c", script])
    }
}

/// Lines of steps that were not done anew.
fn cached(built: &Finished) -> usize {
    built.stderr.lines().filter(|line| line.ends_with(" CACHED")).count()
}

#[test]
fn buildx_builds_stages_with_arguments_and_tells_of_steps() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    let (small, image) = (server.small(), server.image("built"));
    client.file(
        "Dockerfile",
        &format!(
            "# syntax=docker/dockerfile:1\nFROM {small} AS one\nARG V=none\n\
             RUN echo \"arg is $V\" | cat && echo \"$V\" > /v && echo a complaint >&2\n\
             FROM {small} AS never\nRUN exit 7\n\
             FROM {small} AS wanted\nCOPY --from=one /v /\nCOPY . /app\nRUN <<EOF\n\
             cat /v > /document\nEOF\nCMD [\"cat\", \"/v\", \"/document\", \"/app/a.txt\"]\n\
             FROM wanted\nRUN exit 8\n"
        ),
    );
    client.file("a.txt", "of a\n");
    client.file("b.log", "left out");
    client.file(".dockerignore", "*.log\nDockerfile\n.dockerignore\n!none\n");
    let flags = [
        "--build-arg",
        "V=2",
        "--label",
        "l=v",
        "-t",
        &image,
        "--target",
        "wanted",
        "--iidfile",
        "id",
    ];
    let built = client.build(&flags).ok();
    let out = &built.stderr;
    for said in [
        "[internal] load build definition from Dockerfile",
        "[internal] load build context",
        "[one 3/3] RUN echo",
        "arg is 2",
        "a complaint",
        "[wanted 2/",
        "exporting to image",
        "naming to ",
    ] {
        assert!(out.contains(said), "{said:?} is missing in: {out}");
    }
    assert!(!out.contains("exit 7") && !out.contains("exit 8"), "{out}");
    let ran = client.docker(&["run", "--rm", "--network", "none", &image]).ok();
    assert_eq!(ran.text(), "2\n2\nof a");
    assert_eq!(client.shell(&image, "ls /app").ok().text(), "a.txt");
    assert_eq!(server.inspect(&image, "{{.Config.Labels.l}}"), "v");
    let id = fs::read_to_string(client.context.path().join("id")).expect("an id");
    assert_eq!(server.inspect(&image, "{{.Id}}"), id);
    // Nothing is done twice, and what is asked for quietly is an id alone.
    client.file(".dockerignore", "*.log\nDockerfile\n.dockerignore\nid\n");
    let again = client.build(&flags).ok();
    assert!(cached(&again) >= 5 && !again.stderr.contains("arg is 2"), "{}", again.stderr);
    let quiet = client.docker(&[&["build", "-q"], &flags[..8], &["."]].concat());
    assert_eq!(quiet.ok().text(), id);
    let metadata = client.context.path().join("metadata");
    client.build(&["-t", &image, "--target", "one", "--metadata-file", text(&metadata)]).ok();
    let metadata: Value =
        serde_json::from_slice(&fs::read(metadata).expect("metadata")).expect("JSON");
    assert_eq!(metadata["containerimage.config.digest"], server.inspect(&image, "{{.Id}}"));
    // The classic call builds the same, from the same cache.
    let classic = server.docker(&["build", "--target", "one", text(client.context.path())]).ok();
    assert!(classic.text().contains("Step 1/3") && classic.text().contains("Using cache"));
    assert!(server.records().is_empty(), "{:?}", server.records());
}

#[test]
fn files_keep_their_modes_and_links_and_secrets_are_in_no_image() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    let (small, image) = (server.small(), server.image("files"));
    client.file("run.sh", "#!/bin/sh\necho ran\n");
    client.file("d/deep/er", "deep\n");
    client.file("many/none", "");
    for number in 0..300 {
        client.file(&format!("many/{number}"), &number.to_string());
    }
    client.file("large", &"0123456789abcdef".repeat(1 << 19));
    let at = |name: &str| client.context.path().join(name);
    fs::set_permissions(at("run.sh"), fs::Permissions::from_mode(0o751)).expect("a mode");
    symlink("../run.sh", at("d/link")).expect("a link");
    symlink("/etc/outside", at("d/absolute")).expect("a link");
    fs::hard_link(at("run.sh"), at("d/other")).expect("a link");
    client.file(
        "sub/Dockerfile.x",
        &format!(
            "FROM {small}\nCOPY . /c\n\
             RUN --mount=type=secret,id=s cat /run/secrets/s > /dev/null && cat /run/secrets/s | (read x; echo \"${{#x}} letters\")\n\
             RUN --mount=type=secret,id=missing ls /run\n"
        ),
    );
    client.file("secret", "a-secret-word\n");
    client.file("sub/Dockerfile.x.dockerignore", "secret\n");
    let flags = ["-f", "sub/Dockerfile.x", "--secret", "id=s,src=secret", "-t", &image];
    let built = client.build(&flags).ok();
    assert!(built.stderr.contains("13 letters"), "{}", built.stderr);
    let looked = "cd /c; stat -c '%a %u %F' run.sh d d/link; cat d/link d/deep/er; /c/d/other; \
                  ls many | (while read x; do echo; done) | (n=0; while read x; do n=$((n+1)); done; \
                  echo $n); stat -c %s large; ls -d /c/secret /run/secrets/* 2>&1 | cat";
    let found = client.shell(&image, looked).ok();
    let lines: Vec<&str> = found.text().lines().collect();
    assert_eq!(lines[..3], ["751 0 regular file", "755 0 directory", "777 0 symbolic link"]);
    assert_eq!(lines[3..8], ["#!/bin/sh", "echo ran", "deep", "ran", "301"], "{}", found.text());
    assert_eq!(lines[8], (8 << 20).to_string());
    assert!(found.text().contains("No such file"), "{}", found.text());
    let saved = client.docker(&["save", &image]).ok().stdout;
    let word = b"a-secret-word";
    assert!(!saved.windows(word.len()).any(|part| part == word), "the secret is in the image");
    let kept = server.root().join("builds/work");
    assert_eq!(fs::read_dir(kept).expect("a folder").count(), 0);
    let wanted = format!("FROM {small}\nRUN --mount=type=secret,id=missing,required=true true\n");
    client.file("Dockerfile", &wanted);
    let failed = client.build(&[]).exited(1);
    assert!(failed.stderr.contains("no secret missing"), "{}", failed.stderr);
}

#[test]
fn what_fails_is_told_and_what_is_not_there_is_refused_by_name() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    let small = server.small();
    client.file("Dockerfile", &format!("FROM {small}\nRUN echo before; exit 9\nRUN true\n"));
    let failed = client.build(&[]).exited(1);
    let said = &failed.stderr;
    assert!(said.contains("before") && said.contains("exit code: 9"), "{said}");
    assert!(said.contains("2 | >>> RUN echo before; exit 9"), "the line is shown: {said}");
    assert!(!said.contains("[3/3]"), "{said}");
    client.file("Dockerfile", "FROM scratch\nNOPE\n");
    let failed = client.build(&[]).exited(1);
    assert!(
        failed.stderr.contains("line 2") && failed.stderr.contains("NOPE"),
        "{}",
        failed.stderr
    );
    let failed = client.build(&["-f", "other"]).exited(1);
    assert!(failed.stderr.contains("other"), "{}", failed.stderr);
    client.file("Dockerfile", &format!("FROM {small}\nRUN true\n"));
    for (flags, word) in [
        (&["--network", "host"][..], "network"),
        (&["--ulimit", "nofile=10:10"], "--ulimit"),
        (&["--no-cache-filter", "x"], "--no-cache-filter"),
        (&["--platform", "linux/arm64"], "arm64"),
        (&["--build-arg", "BUILDKIT_SYNTAX=docker/dockerfile:1"], "BUILDKIT_SYNTAX"),
        (&["--call", "check"], "--check"),
        (&["--cgroup-parent", "x"], "--cgroup-parent"),
        (&["--output", "type=oci,dest=x"], "OCI"),
        (&["--target", "none"], "none"),
    ] {
        let failed = client.build(flags).exited(1);
        assert!(failed.stderr.contains(word), "{flags:?}: {}", failed.stderr);
    }
    client.file("Dockerfile", &format!("FROM {small}\nRUN --mount=type=ssh true\n"));
    let failed = client.build(&["--ssh", "default=Dockerfile"]);
    assert!(failed.code == 1 && failed.stderr.contains("ssh"), "{}", failed.stderr);
    assert!(server.records().is_empty(), "{:?}", server.records());
}

#[test]
fn a_client_that_is_killed_ends_its_build_and_leaves_nothing() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    client.file("Dockerfile", &format!("FROM {}\nRUN echo begun; sleep 600\n", server.small()));
    for signal in ["KILL", "INT"] {
        let mut build = Started::new(&mut client.command(&["build", "--progress=plain", "."]));
        eventually("the step's cell runs", || server.records().len() == 1);
        let pid = build.child.id().to_string();
        // The plugin is a child of the command.
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = fs::read_to_string(children).unwrap_or_default();
        for pid in children.split_whitespace().chain([pid.as_str()]) {
            finish(Command::new("kill").args(["-s", signal, pid]), b"");
        }
        build.child.wait().expect("wait");
        eventually("the cell is gone", || server.records().is_empty());
        let work = server.root().join("builds/work");
        eventually("its files are gone", || fs::read_dir(&work).expect("a folder").count() == 0);
    }
    server.docker(&["version"]).ok();
}

#[test]
fn an_image_is_put_out_as_files_and_read_from_an_archive() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    client.file("Dockerfile", "FROM scratch\nCOPY a b /d/\nCOPY links /\n");
    client.file("a", "of a\n");
    client.file("b", "of b\n");
    client.file("links/file", "");
    symlink("d/a", client.context.path().join("links/link")).expect("a link");
    client.build(&["--output", "type=local,dest=out"]).ok();
    let out = client.context.path().join("out");
    assert_eq!(fs::read_to_string(out.join("d/b")).expect("a file"), "of b\n");
    assert_eq!(fs::read_to_string(out.join("link")).expect("a file"), "of a\n");
    client.build(&["--output", "type=tar,dest=out.tar"]).ok();
    let packed = fs::File::open(client.context.path().join("out.tar")).expect("an archive");
    let mut names: Vec<String> = tar::Archive::new(packed)
        .entries()
        .expect("an archive")
        .map(|entry| entry.expect("an entry").path().expect("a name").display().to_string())
        .collect();
    names.sort();
    assert!(names.iter().any(|name| name.ends_with("d/a")), "{names:?}");
    // A context on standard input: an archive, or a Dockerfile alone.
    let image = server.image("piped");
    let mut archive = tar::Builder::new(Vec::new());
    archive.follow_symlinks(false);
    archive.append_dir_all(".", client.context.path()).expect("an archive");
    let archive = archive.into_inner().expect("an archive");
    finish(&mut client.command(&["build", "-t", &image, "-"]), &archive).ok();
    let plain = format!("FROM {}\nRUN true\n", server.small());
    finish(&mut client.command(&["build", "-t", &image, "-"]), plain.as_bytes()).ok();
    // Other directories and images by names of their own.
    client.file("more/c", "of c\n");
    let dockerfile = "FROM base\nCOPY --from=more c /\nCOPY --from=base /bin/true /t\n";
    client.file("Dockerfile", dockerfile);
    let base = format!("base=docker-image://{image}");
    let contexts = ["--build-context", "more=more", "--build-context", &base, "-t", &image];
    client.build(&contexts).ok();
    assert_eq!(client.shell(&image, "cat /c").ok().text(), "of c");
}

#[test]
fn an_image_is_pushed_and_one_behind_a_login_is_built_on() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    let registry = Registry::start();
    let private = format!("{}/team/built:1", registry.place);
    client.file("Dockerfile", &format!("FROM {}\nRUN echo private > /p\n", server.small()));
    client.docker(&["login", "-u", "user", "-p", "secret", &registry.place]).ok();
    let pushed = client.build(&["--push", "-t", &private]).ok();
    assert!(pushed.stderr.contains("pushing"), "{}", pushed.stderr);
    client.docker(&["rmi", &private]).ok();
    let image = server.image("public");
    client.file("Dockerfile", &format!("FROM {private}\nRUN cat /p\n"));
    // Who has no login has no image.
    let stranger = Client::of(&server).expect("plugins");
    stranger.file("Dockerfile", &format!("FROM {private}\n"));
    let refused = stranger.build(&[]).exited(1);
    assert!(refused.stderr.contains("credentials"), "{}", refused.stderr);
    let built = client.build(&["-t", &image]).ok();
    assert_eq!(client.shell(&image, "cat /p").ok().text(), "private", "{}", built.stderr);
    client.docker(&["rmi", &private]).ok();
}

#[test]
fn what_builders_are_asked_is_answered() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    let inspected = client.docker(&["buildx", "inspect"]).ok();
    assert!(inspected.text().contains("linux/amd64"), "{}", inspected.text());
    let listed = client.docker(&["buildx", "ls"]).ok();
    assert!(listed.text().contains("running"), "{}", listed.text());
    client.file("Dockerfile", &format!("FROM {}\nRUN echo x > /x\n", server.small()));
    client.build(&[]).ok();
    let used = client.docker(&["buildx", "du"]).ok();
    assert!(used.text().contains("Total") && !used.text().contains("\t0B"), "{}", used.text());
    let pruned = client.docker(&["builder", "prune", "-f"]).ok();
    assert!(pruned.text().contains("Total"), "{}", pruned.text());
    let again = client.build(&[]).ok();
    assert_eq!(cached(&again), 0, "{}", again.stderr);
    client.docker(&["image", "prune", "-f"]).ok();
}

const PROJECT: &str = r#"
services:
  one:
    build: { context: one, args: { WORD: first } }
    image: ONE
    command: ["sh", "-c", "cat /word; sleep infinity"]
    network_mode: none
  two:
    build:
      context: .
      dockerfile_inline: |
        FROM SMALL
        COPY one/file /word
    image: TWO
    command: ["sh", "-c", "cat /word; sleep infinity"]
    network_mode: none
"#;

#[test]
fn compose_and_bake_build_what_their_files_say() {
    let server = Server::start();
    let Some(client) = Client::of(&server) else { return };
    let small = server.small();
    let [one, two] = ["one", "two"].map(|name| server.image(name));
    let project = PROJECT.replace("ONE", &one).replace("TWO", &two).replace("SMALL", &small);
    client.file("compose.yaml", &project);
    client.file("one/Dockerfile", &format!("FROM {small}\nARG WORD\nRUN echo $WORD > /word\n"));
    client.file("one/file", "second\n");
    let compose = |args: &[&str]| client.docker(&[&["compose", "-p", "built"], args].concat());
    compose(&["up", "-d", "--build"]).ok();
    eventually("both say what was built into them", || {
        let logs = compose(&["logs", "--no-color"]);
        logs.text().contains("first") && logs.text().contains("second")
    });
    compose(&["build", "--no-cache"]).ok();
    compose(&["down", "-t", "0"]).ok();
    let bake = format!(
        "group \"default\" {{ targets = [\"a\", \"b\"] }}\n\
         target \"a\" {{\n context = \"one\"\n tags = [\"{one}\"]\n args = {{ WORD = \"baked\" }}\n}}\n\
         target \"b\" {{\n context = \"one\"\n tags = [\"{two}\"]\n dockerfile = \"Next\"\n \
         contexts = {{ base = \"target:a\" }}\n}}\n"
    );
    client.file("one/Next", "FROM base\nCOPY --from=base /word /copied\nRUN cat /word > /next\n");
    fs::remove_file(client.context.path().join("compose.yaml")).expect("a file");
    client.file("docker-bake.hcl", &bake);
    client.docker(&["buildx", "bake", "--progress=plain"]).ok();
    assert_eq!(client.shell(&one, "cat /word").ok().text(), "baked");
    assert_eq!(client.shell(&two, "cat /next /copied").ok().text(), "baked\nbaked");
}

#[test]
fn clients_that_mean_no_good_are_refused_and_leave_nothing() {
    let server = Server::start();
    let small = server.small();
    client::calls_that_make_no_sense(&server);
    let plain = format!("FROM {small}\nCOPY . /all\nRUN true\n");
    let file = |name: &str, content: &str| client::File {
        name: name.to_owned(),
        mode: 0o644,
        content: content.to_owned(),
        ..client::File::default()
    };
    let dockerfile = || file("Dockerfile", &plain);
    // Names and links that lead out, lies about lengths, and what is no file of a context.
    let link = |name: &str, to: &str| client::File {
        mode: 1 << 27 | 0o777,
        link: to.to_owned(),
        ..file(name, "")
    };
    for (files, word) in [
        (vec![dockerfile(), file("../out", "x")], ".."),
        (vec![dockerfile(), file("/etc/out", "x")], "/etc/out"),
        (vec![dockerfile(), file(&format!("{}/../../../out", "x/".repeat(99)), "x")], ".."),
        (vec![dockerfile(), client::File { said: 4, ..file("a", "more than that") }], "changed"),
        (vec![dockerfile(), client::File { said: 99, ..file("a", "less") }], "changed"),
        (vec![dockerfile(), client::File { said: -1, ..file("a", "") }], "negative"),
        (vec![dockerfile(), client::File { said: 1 << 60, ..file("a", "") }], "too much"),
        (vec![dockerfile(), client::File { mode: 1 << 26, ..file("a", "") }], "device"),
        (vec![link("Dockerfile", "/etc/passwd")], "no Dockerfile"),
        (vec![link("Dockerfile", "../../../../etc/passwd")], "no Dockerfile"),
        (vec![file("Dockerfile", "NOPE")], "NOPE"),
        (vec![], "no Dockerfile"),
    ] {
        let why = client::build(&server, files, None).expect_err("it is refused");
        assert!(why.contains(word), "{word}: {why}");
    }
    let through = vec![dockerfile(), link("l", "/etc"), file("l/passwd", "of the link")];
    let why = client::build(&server, through, None);
    let outside = std::fs::read_to_string("/etc/passwd").expect("a file");
    assert!(!outside.contains("of the link"), "{why:?}");
    // One that breaks off in the middle, and one that stays, of a step that would not end.
    let why = client::build(&server, vec![dockerfile(), file("a", "x")], Some(2));
    assert!(why.is_err(), "{why:?}");
    let endless = format!("FROM {small}\nRUN sleep 600\n");
    client::session_that_ends(&server, vec![file("Dockerfile", &endless)]);
    eventually("the cell is gone", || server.records().is_empty());
    let work = server.root().join("builds/work");
    eventually("its files are gone", || fs::read_dir(&work).expect("a folder").count() == 0);
    client::build(&server, vec![dockerfile(), file("a", "x")], None).expect("the server goes on");
    let image = server.image("archive");
    let files = vec![file("Dockerfile", &format!("FROM {small}\nCOPY a /\n")), file("a", "of a")];
    let archive = client::archive(&server, files, &image).expect("an archive");
    server.docker(&["rmi", &image]).ok();
    finish(&mut server.command(&["load"]), &archive).ok();
    let ran = server.docker(&["run", "--rm", "--network", "none", &image, "cat", "/a"]).ok();
    assert_eq!(ran.text(), "of a");
    server.docker(&["image", "prune", "-f"]).ok();
}
