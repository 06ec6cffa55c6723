//! Health checks: what a cell says of its program, by the command line and by the Docker API.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::cell::{Cell, ps, row};
use crate::common::docker::Server;
use crate::common::{IMAGE, eventually, finish, run, small, text, unique};

/// A cell that is well while there is `/tmp/well`.
fn looked_after(flags: &[&str]) -> Cell {
    let check = ["--health-cmd", "cat /tmp/well", "--health-interval", "100ms"];
    Cell::idle("health", &[&check[..], flags].concat())
}

fn health(cell: &Cell) -> Value {
    cell.inspect()["health"].clone()
}

#[track_caller]
fn becomes(cell: &Cell, status: &str) {
    eventually(status, || health(cell)["status"] == status);
}

/// When its last check began.
fn last(cell: &Cell) -> u64 {
    health(cell)["log"].as_array().and_then(|log| log.last()?["start_ms"].as_u64()).unwrap_or(0)
}

#[test]
fn a_cell_is_starting_and_then_what_its_checks_say() {
    let cell = looked_after(&["--health-retries", "2", "--health-start-period", "1h"]);
    let filtered = |word: &str| {
        let filter = [&format!("name={}", cell.name), &format!("health={word}")];
        let listed = ps(&["--filter", filter[0], "--filter", filter[1]]);
        listed.len() == 1
    };
    eventually("a check failed", || last(&cell) > 0);
    let begun = health(&cell);
    assert_eq!((&begun["status"], &begun["failing_streak"]), (&json!("starting"), &json!(0)));
    assert!(begun["log"][0]["output"].as_str().unwrap().contains("/tmp/well"), "{begun}");
    assert_eq!(begun["log"][0]["exit_code"], 1);
    assert!(filtered("starting") && !filtered("none"));
    let format = ["ps", "--filter", &format!("name={}", cell.name), "--format", "{{.Status}}"];
    assert!(run(format).ok().text().ends_with("(health: starting)"));
    cell.shell("echo fine > /tmp/well").ok();
    becomes(&cell, "healthy");
    assert!(filtered("healthy") && run(format).ok().text().ends_with("(healthy)"));
    cell.shell("rm /tmp/well").ok();
    becomes(&cell, "unhealthy");
    let shown = cell.verb(&["inspect", "-f", "{{.State.Health.Status}}"]).ok();
    assert_eq!(shown.text(), "unhealthy");
    let ill = health(&cell);
    assert!(ill["failing_streak"].as_u64() >= Some(2), "{ill}");
    eventually("five are kept", || health(&cell)["log"].as_array().map(Vec::len) == Some(5));
    assert_eq!(row(&cell.name).expect("a row")["health"], "unhealthy");
    // It is the program that says how the cell ends.
    cell.verb(&["stop", "-t", "0"]).ok();
    assert_eq!(cell.verb(&["wait"]).ok().text(), "137");
    assert_eq!(health(&cell)["status"], "unhealthy");
    cell.verb(&["start"]).ok();
    assert_eq!(health(&cell)["status"], "starting");
}

#[test]
fn a_check_runs_as_the_program_does() {
    let line = "id -u; echo $A; pwd; echo oh >&2";
    let flags = ["--health-cmd", line, "--health-interval", "50ms", "--health-retries", "1"];
    let cell = Cell::idle("as", &[&flags[..], &["-u", "1000", "-e", "A=b", "-w", "/usr"]].concat());
    becomes(&cell, "healthy");
    let output = health(&cell)["log"][0]["output"].as_str().unwrap().to_owned();
    let mut lines: Vec<&str> = output.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["/usr", "1000", "b", "oh"]);
}

#[test]
fn a_check_that_takes_too_long_is_killed_with_all_that_it_began() {
    let line = "seq 5000; sleep 4321 & sleep 4321";
    let flags = ["--health-cmd", line, "--health-interval", "50ms", "--health-retries", "2"];
    let cell = Cell::idle("late", &[&flags[..], &["--health-timeout", "400ms"]].concat());
    becomes(&cell, "unhealthy");
    let probe = health(&cell)["log"][0].clone();
    assert_eq!(probe["exit_code"], -1);
    assert_eq!(probe["output"], "Health check exceeded timeout (400ms)");
    // The next one's at most.
    let left = cell.shell("pgrep -fxc 'sleep 4321'; true").ok();
    assert!(left.text().parse::<u32>().unwrap() <= 2, "{}", left.text());
    let long = "head -c 100000 /dev/zero | tr '\\0' x";
    let cell = Cell::idle("long", &["--health-cmd", long, "--health-interval", "50ms"]);
    becomes(&cell, "healthy");
    assert_eq!(health(&cell)["log"][0]["output"], "x".repeat(4096));
    let cell =
        Cell::idle("short", &["--health-cmd", "no-such-program", "--health-interval", "50ms"]);
    becomes(&cell, "unhealthy");
    assert_eq!(health(&cell)["log"][0]["exit_code"], 127);
}

#[test]
fn a_paused_cell_is_not_checked() {
    let cell = looked_after(&[]);
    eventually("a check", || last(&cell) > 0);
    cell.verb(&["pause"]).ok();
    let before = health(&cell);
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(health(&cell), before);
    let at = last(&cell);
    cell.verb(&["unpause"]).ok();
    eventually("the next check", || last(&cell) > at);
    cell.verb(&["pause"]).ok();
    cell.verb(&["kill"]).ok();
}

#[test]
fn no_check_keeps_a_cell_from_ending() {
    let flags = ["run", "--rm", "--health-cmd", "sleep 4321", "--health-interval", "10ms"];
    run([&flags[..], &[IMAGE, "sh", "-c", "sleep 0.5; exit 3"]].concat()).exited(3);
    let cell =
        Cell::start("end", &flags[2..], &["sh", "-c", "trap 'exit 4' TERM; sleep 9999 & wait"]);
    eventually("a check", || cell.shell("pgrep -fx 'sleep 4321'").code == 0);
    cell.verb(&["stop"]).ok();
    assert_eq!(cell.verb(&["wait"]).ok().text(), "4");
}

/// An image that has a check, removed at the end.
struct Image(String);

impl Image {
    fn with_check(check: &Value) -> Self {
        let name = format!("{}:1", unique("checked"));
        let tree = small::tree();
        let mut layer = tar::Builder::new(Vec::new());
        layer.append_dir_all(".", tree.path()).expect("a layer");
        let layer = layer.into_inner().expect("a layer");
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": { "Cmd": ["sleep", "infinity"], "Healthcheck": check },
            "rootfs": { "type": "layers",
                "diff_ids": [exocell_cell::images::Digest::of(&layer).to_string()] },
        });
        let manifest = json!([{ "Config": "c.json", "RepoTags": [name], "Layers": ["l.tar"] }]);
        let (config, manifest) = (config.to_string(), manifest.to_string());
        let mut archive = tar::Builder::new(Vec::new());
        for (name, bytes) in [
            ("c.json", config.as_bytes()),
            ("manifest.json", manifest.as_bytes()),
            ("l.tar", &layer),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, name, bytes).expect("an entry");
        }
        let file = tree.path().join("image.tar");
        fs::write(&file, archive.into_inner().expect("an archive")).expect("a file");
        run(["image", "load", "-i", text(&file)]).ok();
        Self(name)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        finish(&mut crate::common::exocell(["image", "rm", "-f", &self.0]), b"");
    }
}

/// A cell of an image other than the usual one.
fn of_image(image: &Image, flags: &[&str]) -> Cell {
    let name = unique("image");
    run([&["run", "-d", "--name", &name], flags, &[&image.0]].concat()).ok();
    Cell { name }
}

#[test]
fn an_image_has_a_check_unless_the_operator_takes_it_away() {
    let own = json!({"Test": ["CMD", "ls", "/data"], "Interval": 100_000_000, "Retries": 1});
    let image = Image::with_check(&own);
    let cell = of_image(&image, &[]);
    becomes(&cell, "healthy");
    let without = of_image(&image, &["--no-healthcheck"]);
    assert_eq!(health(&without), Value::Null);
    let other = of_image(&image, &["--health-cmd", "ls /missing"]);
    becomes(&other, "unhealthy");
    // Nothing of it is lost on the way through an archive.
    let inspected = run(["image", "inspect", &image.0]).ok().one();
    assert_eq!(inspected["config"]["Healthcheck"], own);
    let server = Server::start();
    let made = ["run", "-d", "--network", "none", "--name", "c", &image.0];
    server.docker(&made).ok();
    eventually("it is healthy", || server.inspect("c", "{{.State.Health.Status}}") == "healthy");
    assert_eq!(server.inspect("c", "{{json .Config.Healthcheck.Test}}"), r#"["CMD","ls","/data"]"#);
    server
        .docker(&["run", "-d", "--network", "none", "--name", "n", "--no-healthcheck", &image.0])
        .ok();
    assert_eq!(server.inspect("n", "{{json .State.Health}}"), "null");
}

#[test]
fn what_is_no_check_is_refused_by_its_flag() {
    for (flags, word) in [
        (&["--health-cmd", ""][..], "--health-cmd"),
        (&["--health-cmd", "x", "--health-interval", "soon"], "--health-interval"),
        (&["--health-cmd", "x", "--health-retries", "0"], "--health-retries"),
        (&["--health-cmd", "x", "--health-timeout", "10us"], "1ms"),
        (&["--health-cmd", "x", "--no-healthcheck"], "--no-healthcheck"),
    ] {
        let refused = run([&["run", "--rm"], flags, &[IMAGE, "true"]].concat()).exited(125);
        assert!(refused.stderr.contains(word), "{flags:?}: {}", refused.stderr);
    }
    run(["run", "--rm", "--health-cmd", "x", "x.wasm"]).exited(125).complains_of(&["isolate"]);
}

#[test]
fn a_containers_health_is_told_as_docker_tells_it() {
    let server = Server::start();
    let flags = [
        "run",
        "-d",
        "--network",
        "none",
        "--name",
        "c",
        "--health-cmd",
        "cat /tmp/well",
        "--health-interval",
        "100ms",
        "--health-retries",
        "2",
        "--health-timeout",
        "10s",
        IMAGE,
        "sleep",
        "infinity",
    ];
    let made = server.docker(&flags).ok();
    assert_eq!(made.stderr, "", "nothing is left out");
    let status = || server.inspect("c", "{{.State.Health.Status}}");
    eventually("it is unhealthy", || status() == "unhealthy");
    let listed = |filter: &str| {
        server.docker(&["ps", "--filter", filter, "--format", "{{.Names}} {{.Status}}"]).ok()
    };
    assert!(listed("health=unhealthy").text().ends_with("(unhealthy)"));
    assert_eq!(listed("health=none").text(), "");
    assert_eq!(server.docker(&["ps", "--filter", "health=good"]).code, 1);
    let log: Value = serde_json::from_str(&server.inspect("c", "{{json .State.Health}}")).unwrap();
    let probe = &log["Log"][0];
    assert_eq!(probe["ExitCode"], 1);
    assert!(probe["Output"].as_str().unwrap().contains("/tmp/well"), "{log}");
    assert!(probe["Start"].as_str() <= probe["End"].as_str(), "{log}");
    assert!(log["FailingStreak"].as_u64() >= Some(2), "{log}");
    server.docker(&["exec", "c", "touch", "/tmp/well"]).ok();
    eventually("it is healthy", || status() == "healthy");
    assert!(listed("health=healthy").text().ends_with("(healthy)"));
    let events = || {
        let until = format!("{}", exocell_cell::now_ms() / 1000 + 1);
        let told = ["events", "--since", "1", "--until", &until, "--format", "{{.Action}}"];
        server.docker(&[&told[..], &["--filter", "container=c"]].concat()).ok().text().to_owned()
    };
    eventually("it is told", || events().contains("health_status: healthy"));
    let told = events();
    for action in ["health_status: unhealthy", "exec_create: /bin/sh -c cat", "exec_die"] {
        assert!(told.contains(action), "{told}");
    }
    server.docker(&["pause", "c"]).ok();
    assert!(listed("name=c").text().ends_with("(Paused)"));
    server.docker(&["unpause", "c"]).ok();
    server.docker(&["stop", "-t", "0", "c"]).ok();
    assert_eq!(status(), "unhealthy");
    server.docker(&["start", "c"]).ok();
    eventually("it is healthy again", || status() == "healthy");
    let create = ["create", "--health-cmd", "x", "--health-interval", "10us", IMAGE, "true"];
    assert!(server.docker(&create).stderr.contains("less than 1ms"));
}
