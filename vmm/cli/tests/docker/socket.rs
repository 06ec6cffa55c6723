//! The Docker server's own socket in a cell: what the cell may have done by it, and what not.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::docker::Server;
use crate::common::{Finished, IMAGE, eventually, exocell, finish, text, unique};

/// What programs of the cell speak with the server by.
const CLIENT: &str = r"
import http.client, json, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.settimeout(100)
        self.sock.connect('/var/run/docker.sock')
def ask(method, path, body=None):
    c = Unix('x')
    c.request(method, path, None if body is None else json.dumps(body), {'Content-Type': 'application/json'})
    r = c.getresponse(); said = r.read().decode(errors='replace')
    try: return [r.status, json.loads(said)]
    except ValueError: return [r.status, said]
out = []
for method, path, body in json.load(sys.stdin):
    for at, one in enumerate(out):
        if isinstance(one[1], dict) and 'Id' in one[1]: path = path.replace('{%d}' % at, one[1]['Id'])
    out.append(ask(method, path, body))
print(json.dumps(out))
";

/// A server, and a container of its operator's that has its socket.
struct Runner {
    server: Server,
    folder: tempfile::TempDir,
}

impl Runner {
    /// With a folder that it may write, and one that it may read, and more `flags`.
    fn start(flags: &[&str]) -> Self {
        Self::at_server(Server::start(), "none", flags)
    }

    fn at_server(server: Server, network: &str, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["work", "read"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join("file"), name).unwrap();
        }
        let socket = format!("{}:/var/run/docker.sock", text(&server.socket()));
        let work = format!("{}/work:/shared", text(folder.path()));
        let read = format!("{}/read:/read:ro", text(folder.path()));
        let fixed = ["run", "-d", "--name", "runner", "--network", network, "--memory", "200m"];
        let binds = ["-v", &socket, "-v", &work, "-v", &read];
        let command = [IMAGE, "sleep", "infinity"];
        server.docker(&[&fixed[..], &binds, flags, &command].concat()).ok();
        Self { server, folder }
    }

    /// What the server answers to calls of a program in container `name`, `{N}` being the id that
    /// the Nth of them made.
    #[track_caller]
    fn asked_in(&self, name: &str, calls: &[(&str, String, Value)]) -> Vec<(u64, Value)> {
        let words = ["exec", "-i", name, "python3", "-c", CLIENT];
        let said = finish(&mut self.server.command(&words), &serde_json::to_vec(calls).unwrap());
        let answers: Vec<(u64, Value)> = serde_json::from_slice(&said.ok().stdout).unwrap();
        assert_eq!(answers.len(), calls.len());
        answers
    }

    #[track_caller]
    fn asked(&self, calls: &[(&str, String, Value)]) -> Vec<(u64, Value)> {
        self.asked_in("runner", calls)
    }

    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: Value) -> (u64, Value) {
        self.asked(&[(method, path.to_owned(), body)]).remove(0)
    }

    /// Asserts that the cell is refused, in words that have all of `words`.
    #[track_caller]
    fn refused(&self, method: &str, path: &str, body: Value, words: &[&str]) {
        let (status, said) = self.ask(method, path, body);
        assert_eq!(status, 403, "{method} {path}: {said}");
        let message = said["message"].as_str().unwrap_or_default();
        for word in words {
            assert!(message.contains(word), "{word:?} is missing in: {message}");
        }
    }

    /// A container that waits, with what `host` says.
    fn wanted(host: Value) -> Value {
        json!({
            "Image": IMAGE, "Cmd": ["sleep", "infinity"], "Labels": { "session": "tests" },
            "Env": ["OWN=own"],
            "HostConfig": merged(json!({ "Memory": 64 << 20, "NetworkMode": "none" }), host),
        })
    }

    fn at(&self, path: &str) -> String {
        format!("{}/{path}", text(self.folder.path()))
    }

    fn exocell(&self, args: &[&str]) -> Finished {
        finish(&mut self.server.exocell(args), b"")
    }
}

fn merged(mut all: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        all[name] = value.clone();
    }
    all
}

fn create(name: &str) -> String {
    format!("/containers/create?name={name}")
}

#[test]
fn a_cell_runs_containers_of_its_own() {
    let runner = Runner::start(&[]);
    let binds = json!({ "Binds": [runner.at("work") + ":/w", runner.at("read") + ":/r:ro"] });
    let all = runner.asked(&[
        ("GET", "/_ping".to_owned(), Value::Null),
        ("POST", create("own"), Runner::wanted(binds)),
        ("POST", "/containers/{1}/start".to_owned(), Value::Null),
        ("GET", "/containers/{1}/json".to_owned(), Value::Null),
        (
            "POST",
            "/containers/own/exec".to_owned(),
            json!({ "Cmd": ["sh", "-c", "cat /w/file /r/file; echo made > /w/new; echo $OWN"],
                    "AttachStdout": true, "Tty": true }),
        ),
        ("POST", "/exec/{4}/start".to_owned(), json!({ "Tty": true })),
        ("GET", "/exec/{4}/json".to_owned(), Value::Null),
        ("POST", "/containers/own/rename?name=renamed".to_owned(), Value::Null),
        ("POST", "/containers/renamed/update".to_owned(), json!({ "Memory": 48 << 20 })),
        ("GET", "/containers/renamed/logs?stdout=1".to_owned(), Value::Null),
        ("POST", "/containers/renamed/stop?t=0".to_owned(), Value::Null),
        ("POST", "/containers/renamed/start".to_owned(), Value::Null),
        ("HEAD", "/containers/renamed/archive?path=/etc".to_owned(), Value::Null),
        ("DELETE", "/containers/renamed?force=1".to_owned(), Value::Null),
    ]);
    let statuses: Vec<u64> = all.iter().map(|(status, _)| *status).collect();
    let wanted = [200, 201, 204, 200, 201, 200, 200, 204, 200, 200, 204, 204, 200, 204];
    assert_eq!(statuses, wanted, "{all:#?}");
    assert_eq!(all[0].1, "OK");
    assert!(all[3].1["Config"]["Env"].to_string().contains("OWN=own"), "{}", all[3].1);
    assert_eq!(all[5].1, "workreadown\r\n", "{}", all[5].1);
    assert_eq!(fs::read_to_string(runner.at("work/new")).unwrap(), "made\n");
}

#[test]
fn a_container_has_no_more_than_the_cell_that_made_it() {
    let runner = Runner::start(&[]);
    let path = create("more");
    let refused = |host: Value, words: &[&str]| {
        runner.refused("POST", &path, Runner::wanted(host), words);
    };
    refused(json!({ "Memory": 300 << 20 }), &["at most the cell's own rights", "200", "runner"]);
    refused(json!({ "PidsLimit": 1 << 20 }), &["at most the cell's own rights"]);
    refused(json!({ "CpuShares": 200_000 }), &["at most the cell's own rights"]);
    for bind in ["/etc:/x", "/:/x", "/root:/x:ro"] {
        refused(json!({ "Binds": [bind] }), &["that the cell runner has"]);
    }
    refused(json!({ "Binds": [runner.at("read") + ":/x"] }), &["read-only (:ro)"]);
    refused(json!({ "Binds": [runner.at("work/../read") + ":/x"] }), &[":ro"]);
    let mount = json!({ "Type": "bind", "Source": "/usr", "Target": "/x", "ReadOnly": true });
    refused(json!({ "Mounts": [mount] }), &["that the cell runner has"]);
    // Nothing is made on the way of what is refused.
    let absent = runner.at("absent");
    refused(json!({ "Binds": [format!("{absent}:/x")] }), &["that the cell runner has"]);
    refused_with(&runner, json!({ "Binds": [runner.at("work/absent") + ":/x"] }), 400);
    assert!(fs::metadata(&absent).is_err());
    // A link of the cell's leads nowhere, and a socket that is in its folder is none that it has.
    runner.server.docker(&["exec", "runner", "ln", "-s", "/etc", "/shared/link"]).ok();
    refused_with(&runner, json!({ "Binds": [runner.at("work/link") + ":/x"] }), 400);
    let _listens = std::os::unix::net::UnixListener::bind(runner.at("work/x.sock")).unwrap();
    refused(json!({ "Binds": [runner.at("work/x.sock") + ":/x"] }), &["that the cell runner has"]);
    // Ports, and networks that others have made.
    runner.server.docker(&["network", "create", "theirs"]).ok();
    let ports = json!({ "PortBindings": { "80/tcp": [{}] }, "NetworkMode": "bridge" });
    refused(ports, &["at most the cell's own rights"]);
    refused(json!({ "NetworkMode": "theirs" }), &["the network theirs"]);
    // Other containers' guests, folders and volumes.
    let other = runner.server.idle("other");
    refused(json!({ "NetworkMode": "container:other" }), &["not made by this cell"]);
    refused(json!({ "VolumesFrom": ["other"] }), &["not made by this cell"]);
    runner.server.docker(&["volume", "create", "theirs"]).ok();
    refused(json!({ "Binds": ["theirs:/x"] }), &["the volume theirs"]);
    let inside = format!("{}/docker/volumes/theirs:/x", text(runner.server.root()));
    refused(json!({ "Binds": [inside] }), &["that the cell runner has"]);
    // What it names not is its own at most: the server's default is more.
    let wanted =
        json!({ "Image": IMAGE, "Cmd": ["true"], "HostConfig": { "NetworkMode": "none" } });
    let (status, made) = runner.ask("POST", &create("least"), wanted);
    assert_eq!(status, 201, "{made}");
    let id = made["Id"].as_str().unwrap();
    let file = runner.server.root().join(format!("docker/containers/{id}.json"));
    let kept: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let table: Value =
        serde_json::from_str(kept["spec"]["capabilities"].as_str().unwrap()).unwrap();
    assert_eq!(table["memory"]["limit"], (200 << 20).to_string(), "{table}");
    assert!(table.get("network").is_none(), "{table}");
    // A change of its limits is held against the same.
    runner.refused("POST", "/containers/least/update", json!({ "Memory": 1 << 30 }), &["rights"]);
    let _ = other;
}

#[track_caller]
fn refused_with(runner: &Runner, host: Value, wanted: u64) {
    let (status, said) = runner.ask("POST", &create("none"), Runner::wanted(host));
    assert_eq!(status, wanted, "{said}");
}

#[test]
fn another_container_is_listed_ended_and_not_looked_into() {
    let runner = Runner::start(&[]);
    let flags = ["run", "-d", "--network", "none", "--name", "other", "-e", "SECRET=hidden"];
    runner.server.docker(&[&flags[..], &[IMAGE, "sleep", "infinity"]].concat()).ok();
    let exec = ["exec", "-d", "other", "sleep", "1000"];
    runner.server.docker(&exec).ok();
    let inspected = runner.server.inspect("other", "{{range .ExecIDs}}{{.}} {{end}}");
    let exec = inspected.split(' ').next().unwrap();
    let (status, listed) = runner.ask("GET", "/containers/json?all=1", Value::Null);
    let text = listed.to_string();
    assert!(status == 200 && text.contains("/other") && !text.contains("hidden"), "{text}");
    for (method, path) in [
        ("GET", "containers/other/json"),
        ("GET", "containers/other/logs?stdout=1"),
        ("POST", "containers/other/attach?stream=1&stdout=1"),
        ("POST", "containers/other/exec"),
        ("GET", "containers/other/archive?path=/etc"),
        ("PUT", "containers/other/archive?path=/etc"),
        ("GET", "containers/other/export"),
        ("GET", "containers/other/changes"),
        ("GET", "containers/other/top"),
        ("GET", "containers/other/stats?stream=0"),
        ("POST", "containers/other/update"),
        ("POST", "containers/other/rename?name=x"),
        ("POST", "containers/other/restart"),
        ("POST", "containers/other/pause"),
        ("POST", "commit?container=other&repo=stolen"),
    ] {
        let body = json!({ "Cmd": ["env"] });
        runner.refused(method, &format!("/{path}"), body, &["not made by this cell"]);
    }
    runner.refused("GET", &format!("/exec/{exec}/json"), Value::Null, &["not made by this cell"]);
    let start = format!("/exec/{exec}/start");
    runner.refused("POST", &start, json!({}), &["not made by this cell"]);
    // What all share stays as it is.
    let image = format!("/images/{IMAGE}");
    runner.refused("DELETE", &image, Value::Null, &["images are the operator's"]);
    runner.refused("POST", &format!("{image}/tag?repo=x"), Value::Null, &["the operator's"]);
    runner.refused("POST", "/build", Value::Null, &["builds no images"]);
    let pull = "/images/create?fromImage=registry.example/x";
    runner.refused("POST", pull, Value::Null, &["registry.example:443", "--allow-net"]);
    runner.refused("POST", "/swarm/init", json!({}), &["not a call for a cell"]);
    // It tidies up.
    let calls = [
        ("POST", "/containers/other/kill".to_owned(), Value::Null),
        ("DELETE", "/containers/other?force=1&v=1".to_owned(), Value::Null),
        ("GET", "/containers/other/json".to_owned(), Value::Null),
    ];
    let statuses: Vec<u64> = runner.asked(&calls).iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [204, 204, 404]);
}

/// As Ryuk does it for the tests of testcontainers.
#[test]
fn what_carries_a_label_is_removed_by_a_container_of_the_cells() {
    let runner = Runner::start(&[]);
    let all = runner.asked(&[
        (
            "POST",
            "/networks/create".to_owned(),
            json!({ "Name": "own", "Labels": { "session": "tests" } }),
        ),
        (
            "POST",
            "/volumes/create".to_owned(),
            json!({ "Name": "own", "Labels": { "session": "tests" } }),
        ),
        (
            "POST",
            create("tested"),
            Runner::wanted(json!({ "NetworkMode": "own", "Binds": ["own:/v"] })),
        ),
        ("POST", "/containers/{2}/start".to_owned(), Value::Null),
        (
            "POST",
            create("reaper"),
            Runner::wanted(json!({
                "Binds": [format!("{}:/var/run/docker.sock", text(&runner.server.socket()))],
                "Privileged": true, "AutoRemove": true, "Memory": 96 << 20,
            })),
        ),
        ("POST", "/containers/{4}/start".to_owned(), Value::Null),
    ]);
    let statuses: Vec<u64> = all.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [201, 201, 201, 204, 201, 204], "{all:#?}");
    let filter = "filters=%7B%22label%22%3A%5B%22session%3Dtests%22%5D%7D";
    let tidied = runner.asked_in(
        "reaper",
        &[
            ("GET", format!("/containers/json?all=1&{filter}"), Value::Null),
            ("DELETE", "/containers/tested?force=1&v=1".to_owned(), Value::Null),
            ("GET", format!("/networks?{filter}"), Value::Null),
            ("DELETE", "/networks/own".to_owned(), Value::Null),
            ("GET", format!("/volumes?{filter}"), Value::Null),
            ("DELETE", "/volumes/own".to_owned(), Value::Null),
            // It has less than the cell that made it, and does not look into that.
            ("GET", "/containers/runner/json".to_owned(), Value::Null),
            ("POST", create("more"), Runner::wanted(json!({ "Memory": 128 << 20 }))),
            ("POST", create("below"), Runner::wanted(json!({ "Memory": 32 << 20 }))),
        ],
    );
    let statuses: Vec<u64> = tidied.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [200, 204, 200, 204, 200, 204, 403, 403, 201], "{tidied:#?}");
    assert_eq!(tidied[0].1.as_array().unwrap().len(), 2);
    assert_eq!(tidied[4].1["Volumes"].as_array().unwrap().len(), 1);
    // What its container has made is its own, too.
    assert_eq!(runner.ask("GET", "/containers/below/json", Value::Null).0, 200);
}

#[test]
fn what_a_cell_may_do_is_known_to_the_next_server_and_ends_with_its_right() {
    let mut runner = Runner::start(&[]);
    let (status, _) = runner.ask("POST", &create("own"), Runner::wanted(json!({})));
    assert_eq!(status, 201);
    let other = runner.server.idle("other");
    runner.server.kill();
    runner.server.resume();
    assert_eq!(runner.ask("GET", "/containers/own/json", Value::Null).0, 200);
    runner.refused("GET", &format!("/containers/{other}/json"), Value::Null, &["not made"]);
    // A folder that was revoked is none to hand on.
    runner.exocell(&["update", "--revoke", "folder:/shared", "runner"]).ok();
    let bind = json!({ "Binds": [runner.at("work") + ":/x"] });
    runner.refused("POST", &create("late"), Runner::wanted(bind), &["that the cell runner has"]);
    runner.exocell(&["update", "--revoke", "folder:/var/run/docker.sock", "runner"]).ok();
    let words = ["exec", "-i", "runner", "python3", "-c", CLIENT];
    let said = finish(&mut runner.server.command(&words), br#"[["GET", "/_ping", null]]"#);
    assert!(said.code != 0 && said.stderr.contains("ConnectionRefusedError"), "{}", said.stderr);
}

/// Nobody has the operator's power by a way that was not known to lead there.
#[test]
fn a_cell_of_another_state_root_is_refused_by_the_server() {
    let server = Server::start();
    let name = unique("lost");
    let socket = format!("{}:/var/run/docker.sock", text(&server.socket()));
    finish(
        &mut exocell(["run", "-d", "--name", &name, "-v", &socket, IMAGE, "sleep", "infinity"]),
        b"",
    )
    .ok();
    let mut ask: Command = exocell(["exec", "-i", &name, "python3", "-c", CLIENT]);
    let said = finish(&mut ask, br#"[["GET", "/_ping", null], ["GET", "/containers/json", null]]"#);
    finish(&mut exocell(["rm", "-f", &name]), b"").ok();
    let answers: Vec<(u64, Value)> = serde_json::from_slice(&said.ok().stdout).unwrap();
    for (status, said) in answers {
        assert!(status == 403 && said.to_string().contains("another state root"), "{said}");
    }
}

#[test]
fn a_cells_containers_ask_its_name_servers_and_lose_what_it_has_lost() {
    let server = Server::with(&["--allow-net", "good.example:80"]);
    let runner = Runner::at_server(server, "bridge", &[]);
    let dns = json!({ "Dns": ["10.77.0.2"] });
    let words = ["name servers of the cell runner"];
    runner.refused("POST", &create("dns"), Runner::wanted(dns), &words);
    // What it may reach itself its containers may, as long as it may.
    let bridge = json!({ "NetworkMode": "bridge" });
    let made = runner.asked(&[
        ("POST", create("own"), Runner::wanted(bridge)),
        ("POST", "/containers/own/start".to_owned(), Value::Null),
        ("POST", "/containers/own/stop?t=0".to_owned(), Value::Null),
    ]);
    let statuses: Vec<u64> = made.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [201, 204, 204], "{made:#?}");
    runner.exocell(&["update", "--deny-net", "good.example:80", "runner"]).ok();
    let words = ["at most the cell's own rights", "good.example"];
    runner.refused("POST", "/containers/own/start", Value::Null, &words);
}

#[test]
fn images_of_tenants_are_none_of_a_cells_and_its_own_have_its_name() {
    let runner = Runner::start(&[]);
    let secret = format!("exocell-e2b/{}/snap:1", unique("ann"));
    runner.exocell(&["tag", IMAGE, &secret]).ok();
    // It is the same image by another name, and so no tenant's alone.
    let (status, _) = runner.ask("GET", &format!("/images/{secret}/json"), Value::Null);
    assert_eq!(status, 200);
    let own = format!("exocell-e2b/{}/snap:1", unique("bob"));
    let label = format!("mine={}", unique("label"));
    runner.exocell(&["commit", "-c", &format!("LABEL {label}"), "runner", &own]).ok();
    let calls = [
        ("GET", format!("/images/{own}/json"), Value::Null),
        ("GET", format!("/images/{own}/history"), Value::Null),
        ("POST", create("theirs"), json!({ "Image": own, "Cmd": ["true"] })),
    ];
    let statuses: Vec<u64> = runner.asked(&calls).iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [404; 3]);
    for path in ["/images/json", "/system/df"] {
        let listed = runner.ask("GET", path, Value::Null).1.to_string();
        assert!(listed.contains(IMAGE) && !listed.contains(&own), "{path}: {listed}");
    }
    // Nor does a prune of the operator's take it.
    let mine = format!("label={label}");
    runner.server.docker(&["image", "prune", "-a", "-f", "--filter", &mine]).ok();
    runner.exocell(&["image", "inspect", &own]).ok();
    for name in [&own, "python:3", "localhost/other/x", "runner/x"] {
        let path = format!("/commit?container=runner&repo={name}");
        runner.refused("POST", &path, Value::Null, &["localhost/runner/"]);
    }
    for name in [&own, &secret] {
        runner.exocell(&["image", "rm", name]).ok();
    }
}

#[test]
fn what_all_share_is_not_one_cells() {
    let runner = Runner::start(&[]);
    let wanted =
        |at: usize| ("POST", "/networks/create".to_owned(), json!({ "Name": format!("n{at}") }));
    let calls: Vec<_> = (0..17).map(wanted).collect();
    let statuses: Vec<u64> = runner.asked(&calls).iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [[201; 16].as_slice(), &[403]].concat());
    let wanted =
        |at: usize| ("POST", "/volumes/create".to_owned(), json!({ "Name": format!("v{at}") }));
    let calls: Vec<_> = (0..65).map(wanted).collect();
    let statuses: Vec<u64> = runner.asked(&calls).iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [[201; 64].as_slice(), &[403]].concat());
    let binds = json!({ "Binds": ["one-more:/x"] });
    runner.refused("POST", &create("more"), Runner::wanted(binds), &["64 volumes"]);
    // The operator has places left, and whose folders are whose is not told.
    runner.server.docker(&["network", "create", "operators"]).ok();
    let flags = ["run", "-d", "--network", "none", "--name", "other", "-v", "/usr:/host:ro"];
    runner.server.docker(&[&flags[..], &[IMAGE, "sleep", "infinity"]].concat()).ok();
    let listed = runner.ask("GET", "/containers/json", Value::Null).1;
    let row = |name: &str| {
        let rows = listed.as_array().unwrap();
        rows.iter().find(|row| row["Names"][0] == format!("/{name}")).unwrap()["Mounts"].clone()
    };
    assert_eq!(row("other"), json!([]));
    assert!(row("runner").to_string().contains("/shared"), "{listed}");
}

#[test]
fn a_pull_of_a_cells_reaches_no_more_than_its_programs() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = Server::with(&["--allow-net", &format!("*:{port}")]);
    let runner = Runner::at_server(server, "bridge", &[]);
    // The rule covers the name. Where it leads is this host, to which the cell itself is not let.
    let pull = format!("/images/create?fromImage=localhost:{port}/x&tag=1");
    let (status, said) = runner.ask("POST", &pull, Value::Null);
    assert!(status == 200 && said.to_string().contains("loopback"), "{said}");
    let heard = listener.accept().map(|(_, from)| from);
    assert_eq!(heard.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

/// Whoever begins it, and by whichever way: what was revoked is gone.
#[test]
fn what_was_revoked_is_so_for_every_start() {
    let runner = Runner::start(&[]);
    let work = || json!([runner.at("work") + ":/w"]);
    let mut again = Runner::wanted(json!({
        "Binds": work(), "RestartPolicy": { "Name": "always" },
    }));
    again["Cmd"] = json!(["sh", "-c", "echo again >> /w/log; sleep 1"]);
    let made = runner.asked(&[
        ("POST", create("own"), Runner::wanted(json!({ "Binds": work() }))),
        ("POST", "/containers/own/start".to_owned(), Value::Null),
        ("POST", "/containers/own/stop?t=0".to_owned(), Value::Null),
        ("GET", "/containers/own/archive?path=/w/file".to_owned(), Value::Null),
        ("POST", create("again"), again),
        ("POST", "/containers/again/start".to_owned(), Value::Null),
    ]);
    let statuses: Vec<u64> = made.iter().map(|(status, _)| *status).collect();
    assert_eq!(statuses, [201, 204, 204, 200, 201, 204], "{made:#?}");
    runner.exocell(&["update", "--revoke", "folder:/shared", "runner"]).ok();
    let words = ["that the cell runner has"];
    for how in ["start", "restart"] {
        runner.refused("POST", &format!("/containers/own/{how}"), Value::Null, &words);
    }
    let file = "/containers/own/archive?path=/w/file";
    assert_eq!(runner.ask("GET", file, Value::Null).0, 404);
    // Nor does the operator start it, or its restarter, or the command.
    assert_ne!(runner.server.docker(&["start", "own"]).code, 0);
    assert_ne!(runner.exocell(&["start", "own"]).code, 0);
    eventually("its restarter starts it no more", || {
        runner.server.inspect("again", "{{.State.Status}}") == "exited"
    });
    // The cell itself has it back by no restart, its own calls among them.
    let reads = || runner.server.docker(&["exec", "runner", "cat", "/shared/file"]);
    assert_ne!(reads().code, 0);
    runner.server.docker(&["restart", "-t", "0", "runner"]).ok();
    let said = reads();
    assert!(said.code != 0 && said.stderr.contains("No such file"), "{}", said.stderr);
    let words = ["exec", "-i", "runner", "python3", "-c", CLIENT];
    let before = runner.server.inspect("runner", "{{.State.StartedAt}}");
    let call = br#"[["POST", "/containers/runner/restart?t=0", null]]"#;
    finish(&mut runner.server.command(&words), call);
    eventually("it has started again", || {
        let state = runner.server.inspect("runner", "{{.State.Status}} {{.State.StartedAt}}");
        state.starts_with("running") && !state.ends_with(&before)
    });
    assert_ne!(reads().code, 0);
}

/// A name of a volume or a network is whose it was first, and is told so.
#[test]
fn what_a_cell_made_is_not_taken_for_the_operators_and_not_the_other_way_round() {
    let runner = Runner::start(&[]);
    runner.server.docker(&["volume", "create", "pgdata"]).ok();
    runner.server.docker(&["network", "create", "app"]).ok();
    let flags = ["run", "-d", "--name", "web", "--network", "app", "-v", "rows:/rows"];
    runner.server.docker(&[&flags[..], &[IMAGE, "sleep", "infinity"]].concat()).ok();
    runner.server.docker(&["stop", "-t", "0", "web"]).ok();
    // Unused or of stopped containers, they are not the cell's to remove.
    for path in ["/volumes/pgdata", "/networks/app"] {
        runner.refused("DELETE", path, Value::Null, &["not made by this cell"]);
    }
    for path in ["/volumes/prune?filters={\"all\":[\"1\"]}", "/networks/prune"] {
        let path = path.replace('{', "%7B").replace('}', "%7D").replace('"', "%22");
        assert_eq!(runner.ask("POST", &path, Value::Null).0, 200);
    }
    runner.server.docker(&["volume", "inspect", "pgdata"]).ok();
    runner.server.docker(&["network", "inspect", "app"]).ok();
    // A name that the operator's container has is not the cell's to make.
    runner.server.docker(&["network", "rm", "app"]).ok();
    let body = json!({ "Name": "app" });
    runner.refused("POST", "/networks/create", body, &["the container web has a network"]);
    // What the cell has made the operator does not come into by its name.
    let made = runner.asked(&[
        ("POST", "/volumes/create".to_owned(), json!({ "Name": "theirs" })),
        ("POST", "/networks/create".to_owned(), json!({ "Name": "theirs" })),
    ]);
    assert!(made.iter().all(|(status, _)| *status == 201), "{made:#?}");
    let command = [IMAGE, "true"];
    for flags in [["-v", "theirs:/x"], ["--network", "theirs"]] {
        let docker = [&["run", "--rm"][..], &flags, &command].concat();
        let said = runner.server.docker(&docker);
        let words = "theirs was made by the cell";
        assert!(said.code != 0 && said.stderr.contains(words), "{}", said.stderr);
        let said = runner.exocell(&docker);
        assert!(said.code != 0 && said.stderr.contains(words), "{}", said.stderr);
    }
    let said = runner.server.docker(&["volume", "create", "theirs"]);
    assert!(said.code != 0 && said.stderr.contains("was made by the cell"), "{}", said.stderr);
    let said = runner.server.docker(&["network", "connect", "theirs", "web"]);
    assert!(said.code != 0 && said.stderr.contains("was made by the cell"), "{}", said.stderr);
    // The way out.
    runner.server.docker(&["volume", "rm", "theirs"]).ok();
    runner.server.docker(&["volume", "create", "theirs"]).ok();
}

#[test]
fn names_in_a_network_are_whose_they_were_first() {
    let server = Server::start();
    server.docker(&["network", "create", "app"]).ok();
    let flags = ["run", "-d", "--name", "web", "--network", "app", "--network-alias", "site"];
    server.docker(&[&flags[..], &[IMAGE, "sleep", "infinity"]].concat()).ok();
    let runner = Runner::at_server(server, "app", &[]);
    let wanted = |alias: &str, network: &str| {
        let mut wanted = Runner::wanted(json!({ "NetworkMode": network }));
        wanted["NetworkingConfig"]["EndpointsConfig"][network]["Aliases"] = json!([alias]);
        wanted
    };
    for (alias, words) in [
        ("web", "is what the container web is called"),
        ("SITE", "is what the container web is called"),
        ("pypi.org", "no name with a dot"),
    ] {
        runner.refused("POST", &create("one"), wanted(alias, "app"), &[words]);
    }
    runner.refused("POST", &create("pypi.org"), wanted("one", "app"), &["no name with a dot"]);
    runner.refused("POST", &create("site"), wanted("one", "app"), &["the container web"]);
    let made = runner.asked(&[
        ("POST", "/networks/create".to_owned(), json!({ "Name": "own" })),
        ("POST", create("one"), wanted("db.test", "own")),
        ("POST", create("two"), wanted("db", "app")),
    ]);
    assert!(made.iter().all(|(status, _)| *status == 201), "{made:#?}");
    runner.refused("POST", "/containers/two/rename?name=site", Value::Null, &["the container web"]);
    let connect = json!({ "Container": "one", "EndpointConfig": { "Aliases": ["pypi.org"] } });
    runner.refused("POST", "/networks/app/connect", connect, &["no name with a dot"]);
}
