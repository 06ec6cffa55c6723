//! `POST /build`: what Docker's clients build with cells, and clients that mean no good.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use serde_json::Value;

use crate::common::docker::Server;
use crate::common::{IMAGE, Started, eventually, finish, text};

/// An archive with these files.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut packed = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        // Names that a careful writer refuses are what is tested.
        let field = header.as_old_mut();
        field.name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        packed.append(&header, *content).expect("an archive");
    }
    packed.into_inner().expect("an archive")
}

/// Sends a context; the status and the lines of the answer.
fn post(server: &Server, query: &str, body: &[u8]) -> (u16, Vec<Value>) {
    let mut stream = server.connect();
    stream.set_read_timeout(Some(Duration::from_secs(90))).expect("a time");
    let head = format!(
        "POST /v1.44/build?{query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
         Content-Type: application/x-tar\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    // One that is refused early may not want to hear the rest.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    let _ = stream.shutdown(Shutdown::Write);
    let mut heard = String::new();
    stream.read_to_string(&mut heard).expect("an answer");
    let status = heard.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    let lines = heard.lines().filter(|line| line.starts_with('{'));
    (status, lines.map(|line| serde_json::from_str(line).expect("JSON")).collect())
}

fn said(lines: &[Value]) -> String {
    lines.iter().filter_map(|line| line["stream"].as_str()).collect()
}

#[test]
fn the_docker_command_builds_an_image() {
    let server = Server::start();
    let (small, image) = (server.small(), server.image("built"));
    let context = tempfile::tempdir().expect("a context");
    let write = |name: &str, content: &str| {
        fs::write(context.path().join(name), content).expect("a file");
    };
    write(
        "Dockerfile",
        &format!(
            "FROM {small} AS one\nARG V\nRUN echo \"$V\" > /v\nFROM {small}\nCOPY --from=one /v /\n\
             COPY . /app\nWORKDIR /app\nCMD [\"sh\", \"-c\", \"cat /v a.txt; ls\"]\n"
        ),
    );
    write("a.txt", "of a\n");
    write("b.log", "left out");
    write(".dockerignore", "*.log\nDockerfile\n.dockerignore\n");
    let path = text(context.path());
    let args = ["build", "--build-arg", "V=2", "--label", "l=v", "-t", &image, path];
    let built = server.docker(&args).ok();
    let out = built.text();
    assert!(out.contains("Step 1/9") && out.contains("Running in"), "{out}");
    assert!(out.contains("Successfully built") && out.contains("Successfully tagged"), "{out}");
    let ran = server.docker(&["run", "--rm", "--network", "none", &image]).ok();
    assert_eq!(ran.text(), "2\nof a\na.txt");
    assert_eq!(server.docker(&["inspect", "-f", "{{.Config.Labels.l}}", &image]).ok().text(), "v");
    let again = server.docker(&args).ok();
    assert!(again.text().contains("Using cache") && !again.text().contains("Running in"));
    let quiet = server.docker(&["build", "-q", "--build-arg", "V=2", "--label", "l=v", path]).ok();
    let id = server.docker(&["inspect", "-f", "{{.Id}}", &image]).ok().text().to_owned();
    assert_eq!(quiet.text(), id);
    let history = server.docker(&["history", "--no-trunc", &image]).ok();
    assert!(history.text().contains("COPY . /app"), "{}", history.text());
    // What fails is told, and with the program's exit code.
    write("Dockerfile", &format!("FROM {small}\nRUN exit 9\n"));
    let failed = server.docker(&["build", path]).exited(9);
    assert!(failed.stderr.contains("returned a non-zero code: 9"), "{}", failed.stderr);
    let plain = format!("FROM {small}\nRUN true\n");
    finish(&mut server.command(&["build", "-"]), plain.as_bytes()).ok();
    assert!(server.records().is_empty(), "{:?}", server.records());
    server.docker(&["builder", "prune", "-f"]).ok();
}

#[test]
fn an_archive_of_files_is_imported_as_an_image() {
    let server = Server::start();
    let (small, image) = (server.small(), server.image("imported"));
    server.docker(&["create", "--network", "none", "--name", "c", &small, "true"]).ok();
    let archive = server.docker(&["export", "c"]).ok().stdout;
    let args = ["import", "-c", "ENV A=1", "-c", "CMD echo $A of the import", "-", &image];
    let id = finish(&mut server.command(&args), &archive).ok().text().to_owned();
    assert!(id.starts_with("sha256:"), "{id}");
    let ran = server.docker(&["run", "--rm", "--network", "none", &image]).ok();
    assert_eq!(ran.text(), "1 of the import");
    let refused = server.docker(&["import", "https://example.org/x.tar"]).exited(1);
    assert!(refused.stderr.contains("https://example.org/x.tar"), "{}", refused.stderr);
    let broken = finish(&mut server.command(&["import", "-"]), &[b'x'; 2048]).exited(1);
    assert!(broken.stderr.contains("archive"), "{}", broken.stderr);
}

#[test]
fn contexts_and_questions_that_lead_out_are_refused() {
    let server = Server::start();
    let small = server.small();
    let plain = format!("FROM {small}\nCOPY . /all\nRUN cat /all/*\n");
    let dockerfile = ("Dockerfile", plain.as_bytes());
    for (files, word) in [
        (&[dockerfile, ("../out", b"x")][..], ".."),
        (&[dockerfile, ("/etc/out", b"x")], "absolute"),
        (&[("other", b"x")], "Cannot locate specified Dockerfile"),
        (&[("Dockerfile", b"NOPE\n")], "NOPE"),
        (&[("Dockerfile", b"")], "FROM"),
        (&[("Dockerfile", &[0xff; 9])], "Dockerfile"),
    ] {
        let (status, lines) = post(&server, "", &archive(files));
        let why = lines[0]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && why.contains(word), "{word}: {status} {lines:?}");
    }
    let long = vec![b'#'; (1 << 20) + 1];
    assert_eq!(post(&server, "", &archive(&[("Dockerfile", &long)])).0, 400);
    assert_eq!(post(&server, "", b"no archive at all").0, 400);
    let whole = archive(&[dockerfile]);
    for (query, status, word) in [
        ("version=2&session=x", 501, "DOCKER_BUILDKIT=0"),
        ("remote=https://example.org/x.git", 501, "example.org"),
        ("networkmode=host", 501, "host"),
        ("squash=1", 501, "squash"),
        ("cpuquota=5", 501, "cpuquota"),
        ("platform=linux/arm64", 400, "arm64"),
        ("buildargs=x", 400, "buildargs"),
        ("t=Not%20a%20name", 400, "Not a name"),
        ("target=none", 200, "none"),
        ("dockerfile=../../etc/passwd", 400, "Cannot locate"),
    ] {
        let (found, lines) = post(&server, query, &whole);
        let why = lines.iter().find_map(|line| line["message"].as_str().or(line["error"].as_str()));
        assert!(
            found == status && why.unwrap_or_default().contains(word),
            "{query}: {found} {lines:?}"
        );
    }
    // What is said with an empty value is not said.
    let (status, lines) = post(&server, "q=1&cpuquota=0&squash=&labels=null&rm=0", &whole);
    assert!(status == 200 && said(&lines).starts_with("sha256:"), "{lines:?}");
    let id = said(&lines).trim().to_owned();
    // Another test's prune may have found it without a name already.
    finish(&mut server.exocell(&["image", "rm", &id]), b"");
}

#[test]
fn a_client_without_buildkits_other_protocol_hears_its_messages() {
    let server = Server::start();
    let (small, image) = (server.small(), server.image("traced"));
    let dockerfile = format!("FROM {small}\nRUN echo loud > /made && cat /made\n");
    let whole = archive(&[("Dockerfile", dockerfile.as_bytes())]);
    let query = format!("version=2&t={image}");
    let (status, lines) = post(&server, &query, &whole);
    assert_eq!(status, 200);
    let (last, told) = lines.split_last().expect("lines");
    assert_eq!(last["id"], "moby.image.id", "{last}");
    assert_eq!(last["aux"]["ID"], server.inspect(&image, "{{.Id}}").as_str());
    assert!(told.len() > 2 && told.iter().all(|line| line["id"] == "moby.buildkit.trace"));
    let failing = archive(&[("Dockerfile", format!("FROM {small}\nRUN exit 3\n").as_bytes())]);
    let (_, lines) = post(&server, "version=2", &failing);
    assert_eq!(lines.last().expect("lines")["errorDetail"]["code"], 3, "{lines:?}");
}

#[test]
fn a_client_that_hangs_up_ends_its_build() {
    let server = Server::start();
    let small = server.small();
    let context = tempfile::tempdir().expect("a context");
    let dockerfile = format!("FROM {small}\nRUN sleep 600\n");
    fs::write(context.path().join("Dockerfile"), dockerfile).expect("a file");
    let mut build = Started::new(&mut server.command(&["build", text(context.path())]));
    eventually("the command's cell runs", || server.records().len() == 1);
    build.child.kill().expect("kill");
    build.child.wait().expect("wait");
    eventually("the cell is gone", || server.records().is_empty());
    let work = server.root().join("builds/work");
    eventually("its files are gone", || fs::read_dir(&work).expect("a folder").count() == 0);
}

#[test]
fn a_build_is_in_a_network_heeds_its_cache_and_tells_complaints_apart() {
    let server = Server::start();
    let small = server.small();
    server.docker(&["network", "create", "n"]).ok();
    let flags = ["run", "-d", "--name", "peer", "--network", "n", IMAGE, "sleep", "infinity"];
    server.docker(&flags).ok();
    let found = format!("FROM {IMAGE}\nRUN getent hosts peer && echo complaint >&2\n");
    let context = archive(&[("Dockerfile", found.as_bytes())]);
    let (status, lines) = post(&server, "networkmode=n&q=0", &context);
    assert_eq!(status, 200);
    let texts: Vec<&str> = lines.iter().filter_map(|line| line["stream"].as_str()).collect();
    assert!(texts.contains(&"\u{1b}[91mcomplaint\n\u{1b}[0m"), "{texts:?}");
    let (_, lines) = post(&server, "networkmode=none&nocache=1", &context);
    assert_eq!(lines.last().expect("a line")["errorDetail"]["code"], 2, "{lines:?}");
    let (status, lines) = post(&server, "networkmode=missing", &context);
    assert!(status == 400 && lines[0].to_string().contains("missing"), "{lines:?}");
    let kept = format!("FROM {small}\nRUN cat /etc/hostname > /kept\n");
    let kept = archive(&[("Dockerfile", kept.as_bytes())]);
    for (query, uses) in [
        ("", false),
        ("", true),
        ("cachefrom=%5B%22no-such-image%22%5D", false),
        ("cachefrom=%5B%5D", true),
    ] {
        let (_, lines) = post(&server, query, &kept);
        assert_eq!(said(&lines).contains("Using cache"), uses, "{query}: {}", said(&lines));
    }
    server.docker(&["rm", "-f", "peer"]).ok();
    server.docker(&["network", "rm", "n"]).ok();
    server.docker(&["image", "prune", "-f"]).ok();
}
