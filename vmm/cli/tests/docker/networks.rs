//! Networks that Docker's clients make, volumes with labels, and projects of compose.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::common::docker::Server;
use crate::common::{Finished, IMAGE, eventually, finish, text};

/// Starts a container that waits.
fn start(server: &Server, name: &str, flags: &[&str]) {
    let fixed = ["run", "-d", "--name", name];
    server.docker(&[&fixed[..], flags, &[IMAGE, "sleep", "infinity"]].concat()).ok();
}

/// Where `host` is, as container `from` knows it.
fn whereis(server: &Server, from: &str, host: &str) -> String {
    let found = server.docker(&["exec", from, "getent", "hosts", host]);
    found.text().split(' ').next().unwrap_or_default().to_owned()
}

fn inspected(server: &Server, what: &str, key: &str) -> Value {
    server.docker(&[what, "inspect", key]).ok().one()
}

#[test]
fn containers_of_a_network_know_each_other_as_docker_has_it() {
    let server = Server::start();
    server.docker(&["network", "create", "--label", "a=b", "back"]).ok();
    start(&server, "db", &["--network", "back", "--network-alias", "database"]);
    start(&server, "web", &["--network", "back"]);
    let address = server.inspect("db", "{{.NetworkSettings.Networks.back.IPAddress}}");
    assert!(address.starts_with("172."), "{address}");
    assert_eq!(whereis(&server, "web", "db"), address);
    assert_eq!(whereis(&server, "web", "database"), address);
    let shown = inspected(&server, "network", "back");
    assert_eq!(shown["Labels"]["a"], "b");
    let members = shown["Containers"].as_object().expect("containers");
    let names: Vec<&str> = members.values().filter_map(|own| own["Name"].as_str()).collect();
    assert!(names.contains(&"db") && names.contains(&"web"), "{shown}");
    let id = shown["Id"].as_str().expect("an id");
    assert_eq!(server.inspect("db", "{{.NetworkSettings.Networks.back.NetworkID}}"), id);
    let filtered = server.docker(&["ps", "--filter", "network=back", "--format", "{{.Names}}"]);
    assert_eq!(filtered.ok().text().lines().count(), 2);

    // Later, and before it runs.
    server.docker(&["network", "create", "--subnet", "10.66.0.0/24", "front"]).ok();
    server
        .docker(&["network", "connect", "--ip", "10.66.0.9", "--alias", "w", "front", "web"])
        .ok();
    server.docker(&["create", "--name", "late", "--network", "back", IMAGE, "sleep", "9999"]).ok();
    server.docker(&["network", "connect", "front", "late"]).ok();
    server.docker(&["start", "late"]).ok();
    assert_eq!(whereis(&server, "late", "w"), "10.66.0.9");
    assert_eq!(whereis(&server, "late", "db"), address);
    server.docker(&["network", "disconnect", "front", "web"]).ok();
    assert_eq!(whereis(&server, "late", "w"), "");
    let networks = server.inspect("web", "{{len .NetworkSettings.Networks}}");
    assert_eq!(networks, "1");

    let used = server.docker(&["network", "rm", "back"]).exited(1);
    assert!(used.stderr.contains("has active endpoints"), "{}", used.stderr);
    let taken = server.docker(&["network", "create", "back"]).exited(1);
    assert!(taken.stderr.contains("network with name back already exists"), "{}", taken.stderr);
    server.docker(&["rm", "-f", "db", "web", "late"]).ok();
    let pruned = server.docker(&["network", "prune", "-f"]).ok();
    assert!(pruned.text().contains("back") && pruned.text().contains("front"), "{}", pruned.text());
    let left = server.docker(&["network", "ls", "-q"]).ok();
    assert_eq!(left.text().lines().count(), 2, "bridge and none stay");
    server.docker(&["network", "rm", "bridge"]).exited(1);
}

#[test]
fn a_container_comes_into_a_network_and_has_another_name_while_it_runs() {
    let server = Server::start();
    start(&server, "alone", &[]);
    server.docker(&["network", "create", "late"]).ok();
    start(&server, "db", &["--network", "late"]);
    server.docker(&["network", "connect", "--alias", "app", "late", "alone"]).ok();
    let address = server.inspect("db", "{{.NetworkSettings.Networks.late.IPAddress}}");
    assert_eq!(whereis(&server, "alone", "db"), address);
    let own = server.inspect("alone", "{{.NetworkSettings.Networks.late.IPAddress}}");
    assert_eq!(whereis(&server, "db", "app"), own);

    server.docker(&["rename", "db", "base"]).ok();
    assert_eq!(whereis(&server, "alone", "base"), address);
    assert_eq!(whereis(&server, "alone", "db"), "");
    let mut rename = server.exocell(&["rename", "alone", "together"]);
    finish(&mut rename, b"").ok();
    assert_eq!(whereis(&server, "base", "together"), own);
    assert_eq!(whereis(&server, "base", "app"), own, "aliases stay");

    let shown = server.inspect("base", "{{.NetworkSettings.Networks.late.MacAddress}}");
    let inside = server.docker(&["exec", "base", "cat", "/sys/class/net/eth0/address"]).ok();
    assert_eq!(shown, inside.text());
    server.docker(&["restart", "-t", "0", "together"]).ok();
    assert_eq!(whereis(&server, "together", "base"), address);
}

#[test]
fn a_container_has_the_network_of_another_as_docker_has_it() {
    let server = Server::start();
    let serves = ["python3", "-m", "http.server", "80"];
    let fixed = ["run", "-d", "--name", "web", IMAGE];
    let id = server.docker(&[&fixed[..], &serves].concat()).ok().text().to_owned();
    start(&server, "near", &["--network", "container:web"]);
    let asks = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 80), 1)'";
    eventually("the server answers", || {
        server.docker(&["exec", "near", "sh", "-c", asks]).code == 0
    });
    // As compose names it.
    let by_id = format!("container:{id}");
    server.docker(&["run", "--rm", "--network", &by_id, IMAGE, "sh", "-c", asks]).ok();
    assert_eq!(server.inspect("near", "{{.HostConfig.NetworkMode}}"), by_id);
    assert_eq!(server.inspect("near", "{{len .NetworkSettings.Networks}}"), "0");
    server.docker(&["exec", "near", "sh", "-c", "echo kept > /kept"]).ok();
    server.docker(&["restart", "-t", "0", "near"]).ok();
    assert_eq!(server.docker(&["exec", "near", "cat", "/kept"]).ok().text(), "kept");
    let refused = |args: &[&str], words: &str| {
        let fixed = ["run", "--rm", "--network", "container:web"];
        let said = server.docker(&[&fixed[..], args, &[IMAGE, "true"]].concat());
        assert!(said.code != 0 && said.stderr.contains(words), "{args:?}: {}", said.stderr);
    };
    refused(&["-p", "80:80"], "conflicting options: port publishing");
    refused(&["--dns", "1.1.1.1"], "conflicting options: dns and the network mode");
    refused(&["-v", "/tmp:/t"], "no more folders");
    refused(&["-m", "1g"], "more than the cell");
    server.docker(&["network", "create", "other"]).ok();
    let joined = server.docker(&["network", "connect", "other", "near"]);
    assert!(
        joined.stderr.contains("cannot be connected to any other network"),
        "{}",
        joined.stderr
    );
    server.docker(&["stop", "-t", "0", "web"]).ok();
    crate::common::docker::says(
        &server,
        &["inspect", "--format", "{{.State.Status}}", "near"],
        "exited",
    );
    let late = server.docker(&["start", "near"]);
    assert!(late.code != 0 && late.stderr.contains("does not run"), "{}", late.stderr);
    server.docker(&["rm", "-f", "near", "web"]).ok();
    assert_eq!(server.records(), Vec::<String>::new());
}

#[test]
fn what_networks_cannot_be_is_refused_in_words() {
    let server = Server::start();
    let refused = |args: &[&str], words: &str| {
        let said = server.docker(args);
        assert!(said.code != 0 && said.stderr.contains(words), "{args:?}: {}", said.stderr);
    };
    refused(&["network", "create", "--driver", "overlay", "x"], "could not find plugin overlay");
    refused(&["network", "create", "--ipv6", "x"], "IPv4");
    refused(&["network", "create", "--subnet", "nonsense", "x"], "invalid CIDR");
    refused(&["network", "create", "host"], "choose another name");
    refused(&["network", "inspect", "x"], "not found");
    refused(&["network", "rm", "x"], "not found");
    refused(&["run", "--rm", "--network", "x", IMAGE, "true"], "network x not found");
    let noted = server.docker(&["network", "create", "-o", "com.example.word=1", "noted"]).ok();
    assert!(!noted.text().is_empty());
    server.docker(&["run", "-d", "--name", "none", "--network", "none", IMAGE, "sleep", "99"]).ok();
    refused(&["network", "connect", "noted", "none"], "none");
}

#[test]
fn volumes_have_labels_and_are_pruned() {
    let server = Server::start();
    server.docker(&["volume", "create", "--label", "a=b", "one"]).ok();
    server.docker(&["volume", "create", "two"]).ok();
    let nameless = server.docker(&["volume", "create"]).ok().text().to_owned();
    assert_eq!(inspected(&server, "volume", "one")["Labels"]["a"], "b");
    let listed = |filter: &str| {
        let listed = server.docker(&["volume", "ls", "-q", "--filter", filter]).ok();
        listed.text().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(listed("label=a=b"), ["one"]);
    server.docker(&["create", "--name", "user", "-v", "two:/two", IMAGE, "true"]).ok();
    assert_eq!(listed("dangling=false"), ["two"]);
    server.docker(&["volume", "prune", "-f"]).ok();
    assert_eq!(listed("name=o"), ["one", "two"], "{nameless} is gone, those with a name are not");
    server.docker(&["volume", "prune", "-a", "-f"]).ok();
    assert_eq!(listed("name=o"), ["two"]);
}

/// An image that wants a volume at /data, where it has files.
fn image_with_a_volume(server: &Server) -> String {
    let image = server.image("volume");
    let context = tempfile::tempdir().expect("a context");
    let marks = "import os; os.setxattr('/data/sub/file', 'user.mark', b'kept')";
    let dockerfile = format!(
        "FROM {IMAGE}\nRUN mkdir -p /data/sub && echo of the image > /data/sub/file && \
         ln -s sub /data/link && chown 7:8 /data /data/sub/file && chmod 1770 /data && \
         python3 -c \"{marks}\"\nVOLUME /data\n"
    );
    fs::write(context.path().join("Dockerfile"), dockerfile).expect("a file");
    server.docker(&["build", "-t", &image, text(context.path())]).ok();
    image
}

#[test]
fn a_new_volume_has_what_the_image_has_there() {
    let server = Server::start();
    let image = image_with_a_volume(&server);
    let run = |flags: &[&str], script: &str| {
        let fixed = ["run", "--rm", "--network", "none"];
        server.docker(&[&fixed[..], flags, &[&image, "sh", "-c", script]].concat()).ok()
    };
    let look = "stat -c '%a %u:%g' /data /data/sub/file; cat /data/sub/file; readlink /data/link; \
                python3 -c \"import os; print(os.getxattr('/data/sub/file', 'user.mark'))\"";
    let whole = "1770 7:8\n644 7:8\nof the image\nsub\nb'kept'";
    assert_eq!(run(&["-v", "named:/data"], &format!("{look}; rm /data/link")).text(), whole);
    // It is as it was left, and for whoever comes.
    assert_eq!(run(&["-v", "named:/data"], "ls -A /data").text(), "sub");
    assert_eq!(run(&["-v", "named:/other"], "ls -A /other").text(), "sub");
    let bare = "type=volume,src=bare,dst=/data,volume-nocopy";
    assert_eq!(run(&["--mount", bare], "ls -A /data; stat -c %a /data").text(), "755");
    // Where the image has nothing, too.
    assert_eq!(run(&["-v", "fresh:/new"], "ls -A /new; stat -c '%a %u' /new").text(), "755 0");
    let mount = "type=volume,src=again,dst=/data";
    let own = ["run", "--rm", "--mount", mount, &image, "sh", "-c", look];
    let shown = finish(&mut server.exocell(&own), b"");
    assert_eq!(shown.ok().text(), whole);
}

#[test]
fn volumes_without_a_name_go_with_their_containers() {
    let server = Server::start();
    let image = image_with_a_volume(&server);
    let volumes = || {
        let listed = server.docker(&["volume", "ls", "-q"]).ok();
        listed.text().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let start = |name: &str, flags: &[&str]| {
        let fixed = ["run", "-d", "--network", "none", "--name", name];
        server.docker(&[&fixed[..], flags, &[&image, "sleep", "infinity"]].concat()).ok();
    };
    start("one", &["-v", "/more"]);
    assert_eq!(volumes().len(), 2);
    let mounts = server.inspect("one", "{{range .Mounts}}{{.Type}} {{.Destination}} {{end}}");
    assert_eq!(mounts, "volume /more volume /data ");
    let name = server
        .inspect("one", "{{range .Mounts}}{{if eq .Destination \"/data\"}}{{.Name}}{{end}}{{end}}");
    assert!(volumes().contains(&name) && name.len() == 64, "{name}");
    let from = ["run", "--rm", "--network", "none", "--volumes-from", "one:ro", IMAGE];
    let seen = server.docker(&[&from[..], &["sh", "-c", "ls -A /data; touch /data/x"]].concat());
    assert_eq!(seen.exited(1).text(), "link\nsub");
    server.docker(&["exec", "one", "sh", "-c", "rm -r /data/sub /data/link"]).ok();
    server.docker(&["restart", "-t", "0", "one"]).ok();
    // Emptied by its container, it is not filled again.
    assert_eq!(server.docker(&["exec", "one", "ls", "-A", "/data"]).ok().text(), "");
    // Another container has it by its name: it is that one's, too.
    start("two", &["-v", &format!("{name}:/data")]);
    server.docker(&["volume", "rm", &name]).exited(1);
    server.docker(&["rm", "-f", "-v", "one"]).ok();
    assert_eq!(volumes(), [name.as_str()]);
    server.docker(&["rm", "-f", "-v", "two"]).ok();
    assert_eq!(volumes(), [name.as_str()], "it was not made for that container");
    server.docker(&["volume", "prune", "-f"]).ok();
    assert_eq!(volumes(), [""; 0]);

    let once = ["run", "--rm", "--network", "none", &image, "cat", "/data/sub/file"];
    assert_eq!(server.docker(&once).ok().text(), "of the image");
    eventually("its volume is gone", || volumes().is_empty());

    // So it is without the server.
    let own = |args: &[&str]| finish(&mut server.exocell(args), b"").ok();
    // Nobody granted a folder: it holds what the cell's disk may.
    let fill = "dd if=/dev/zero of=/more/f bs=1M count=99; stat -c %s /more/f";
    let size = ["run", "--rm", "--disk", "64m", "-v", "/more", IMAGE, "sh", "-c", fill];
    assert_eq!(own(&size).text(), (64 << 20).to_string());
    let once = ["run", "--rm", "-v", "/more", &image, "cat", "/data/sub/file"];
    assert_eq!(own(&once).text(), "of the image");
    assert_eq!(volumes(), [""; 0]);
    own(&["run", "-d", "--name", "three", &image, "sleep", "infinity"]);
    assert_eq!(
        server.inspect("three", "{{range .Mounts}}{{.Type}} {{.Destination}}{{end}}"),
        "volume /data"
    );
    assert_eq!(volumes().len(), 1);
    own(&["rm", "-f", "three"]);
    assert_eq!(volumes().len(), 1);
    // One that is new may be of a cell that is about to begin.
    eventually("it is pruned", || {
        own(&["system", "prune", "-f", "--volumes"]);
        volumes().is_empty()
    });
    own(&["run", "-d", "--name", "four", &image, "sleep", "infinity"]);
    own(&["rm", "-f", "-v", "four"]);
    assert_eq!(volumes(), [""; 0]);
}

const PROJECT: &str = r#"
services:
  web:
    image: IMAGE
    command: python3 -m http.server 80 --directory /data
    depends_on:
      db: {condition: service_healthy}
    volumes: ["data:/data", "./conf:/conf:ro"]
    configs: [{source: greeting, target: /etc/greeting}]
    secrets: [word]
    networks: [front, back]
  db:
    image: IMAGE
    command: python3 -m http.server 5432 --directory /etc
    healthcheck:
      test: ["CMD", "python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:5432/')"]
      interval: 1s
      retries: 30
    networks:
      back: {aliases: [database]}
    restart: on-failure
  near:
    image: IMAGE
    command: sleep infinity
    network_mode: "service:db"
    depends_on: [db]
  tool:
    image: IMAGE
    profiles: [tools]
    command: getent hosts web
    networks: [front]
configs:
  greeting: {content: "hello"}
secrets:
  word: {file: ./word}
volumes:
  data: {labels: {kind: own}}
networks:
  front: {}
  back: {internal: true}
"#;

/// A project in a folder of its own.
struct Project<'a> {
    server: &'a Server,
    folder: tempfile::TempDir,
    plugins: PathBuf,
}

impl Project<'_> {
    fn command(&self, args: &[&str]) -> Command {
        let config = self.folder.path().join("config");
        fs::create_dir_all(&config).expect("a folder");
        let plugins = serde_json::json!({ "cliPluginsExtraDirs": [self.plugins] });
        fs::write(config.join("config.json"), plugins.to_string()).expect("a file");
        let mut command = self.server.command(&[&["compose", "-p", "project"], args].concat());
        command.current_dir(self.folder.path()).env("DOCKER_CONFIG", config);
        command
    }

    #[track_caller]
    fn compose(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args), b"")
    }
}

#[test]
fn a_project_of_compose_comes_up_works_and_goes() {
    let Some(plugins) = std::env::var_os("EXOCELL_TEST_PLUGINS").filter(|path| !path.is_empty())
    else {
        eprintln!("no plugins of docker's are here: compose is not tested");
        return;
    };
    let server = Server::start();
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("a file");
    file("compose.yaml", &PROJECT.replace("IMAGE", IMAGE));
    file("word", "secret");
    fs::create_dir(folder.path().join("conf")).expect("a folder");
    let project = Project { server: &server, folder, plugins: plugins.into() };
    project.compose(&["up", "-d", "--wait"]).ok();
    let states = project.compose(&["ps", "--format", "{{.Service}} {{.State}} {{.Health}}"]).ok();
    let mut lines: Vec<&str> = states.text().lines().map(str::trim).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["db running healthy", "near running", "web running"]);
    let fetch =
        "import urllib.request as u; print(u.urlopen('http://database:5432/hostname').read())";
    let said = project.compose(&["exec", "-T", "web", "python3", "-c", fetch]).ok();
    assert!(said.text().starts_with("b'"), "{}", said.text());
    let own =
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:5432/hostname').read())";
    project.compose(&["exec", "-T", "near", "python3", "-c", own]).ok();
    let files =
        project.compose(&["exec", "-T", "web", "cat", "/etc/greeting", "/run/secrets/word"]);
    assert_eq!(files.ok().text(), "hellosecret");
    let one_off = project.compose(&["run", "--rm", "-T", "tool"]).ok();
    assert!(one_off.text().contains("web"), "{}", one_off.text());
    project.compose(&["cp", "word", "web:/data/word"]).ok();
    eventually("the log of a request is shown", || {
        project.compose(&[
            "exec",
            "-T",
            "db",
            "python3",
            "-c",
            &fetch.replace("database:5432", "web"),
        ]);
        project.compose(&["logs", "--no-color", "web"]).text().contains("GET /hostname")
    });
    let scaled = project.compose(&["up", "-d", "--scale", "db=2", "--wait"]).ok();
    let count = "import socket; print(len({own[4][0] for own in socket.getaddrinfo('db', 1)}))";
    let found = project.compose(&["exec", "-T", "web", "python3", "-c", count]).ok();
    assert_eq!(found.text(), "2", "{}", scaled.stderr);
    project.compose(&["stop", "-t", "1"]).ok();
    project.compose(&["start"]).ok();
    project.compose(&["exec", "-T", "web", "cat", "/data/word"]).ok();
    project.compose(&["down", "-v", "-t", "1"]).ok();
    assert_eq!(server.docker(&["ps", "-aq"]).ok().text(), "");
    assert_eq!(server.docker(&["volume", "ls", "-q"]).ok().text(), "");
    assert_eq!(server.docker(&["network", "ls", "-q"]).ok().text().lines().count(), 2);
}

/// Whichever door it left by, and whether it ran then.
#[test]
fn a_network_that_was_left_is_left_at_the_next_start() {
    let server = Server::start();
    for name in ["one", "two"] {
        server.docker(&["network", "create", name]).ok();
    }
    let flags = ["run", "-d", "--name", "c", "--network", "one"];
    server.docker(&[&flags[..], &[IMAGE, "sleep", "infinity"]].concat()).ok();
    server.docker(&["network", "connect", "two", "c"]).ok();
    let networks =
        || server.inspect("c", "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}");
    assert_eq!(networks().trim(), "one two");
    finish(&mut server.exocell(&["network", "disconnect", "one", "c"]), b"").ok();
    server.docker(&["restart", "-t", "0", "c"]).ok();
    assert_eq!(networks().trim(), "two");
    server.docker(&["stop", "-t", "0", "c"]).ok();
    server.docker(&["network", "disconnect", "two", "c"]).ok();
    server.docker(&["network", "connect", "one", "c"]).ok();
    server.docker(&["update", "--restart", "on-failure", "c"]).ok();
    assert_eq!(networks().trim(), "one");
    server.docker(&["start", "c"]).ok();
    assert_eq!(networks().trim(), "one");
    let members = server.docker(&["network", "inspect", "two", "--format", "{{len .Containers}}"]);
    assert_eq!(members.ok().text(), "0");
}
