//! Cells under Debian's containerd, driven by its own client.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};

use containerd_shim_protos::api::{
    CheckpointTaskRequest, CreateTaskRequest, DeleteRequest, KillRequest, StartRequest,
    StateRequest, Status, UpdateTaskRequest, WaitRequest,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::ttrpc::context::Context;
use containerd_shim_protos::ttrpc::{Code, Error};
use containerd_shim_protos::{Client, TaskClient};

use crate::common::containerd::{Containerd, NAME};
use crate::common::host::{self, kill, namespace, processes};
use crate::common::pty::OnTerminal;
use crate::common::{Started, eventually, finish, text, unique};

#[test]
fn a_program_has_what_the_bundle_says() {
    let containerd = Containerd::start("");
    let said = containerd.shell(&["--env", "A=b c"], "echo $A; echo e >&2; pwd; id -u; exit 7");
    let said = said.exited(7);
    assert_eq!((said.text(), said.stderr.as_str()), ("b c\n/\n0", "e\n"));
    assert_eq!(containerd.shell(&["--cwd", "/data"], "pwd").ok().text(), "/data");
    // The kernel is the cell's.
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_ne!(containerd.shell(&[], "uname -r").ok().text(), host.trim());
    containerd.shell(&["--read-only"], "! touch /x").ok();
    let limits = containerd.shell(&["--rootfs-propagation", "shared"], "true");
    assert!(limits.code != 0 && limits.stderr.contains("rootfsPropagation"), "{}", limits.stderr);
    let id = unique("none");
    let none = finish(&mut containerd.run_command(&["--rm"], &id, &["/no/such"]), b"");
    assert!(none.code != 0 && none.stderr.contains("executable file not found"), "{}", none.stderr);
    assert!(containerd.ctr(&["task", "ls", "-q"]).ok().text().is_empty());
}

#[test]
fn streams_are_passed_on_both_ways() {
    let containerd = Containerd::start("");
    let id = unique("cat");
    let said = finish(&mut containerd.run_command(&["--rm"], &id, &["cat"]), b"in and out\n").ok();
    assert_eq!(said.text(), "in and out");
    // More than any pipe holds.
    let many = containerd.shell(&[], "head -c 3000000 /dev/zero; echo end").ok();
    assert_eq!(many.stdout.len(), 3_000_004);
    let id = unique("tty");
    let script = ["sh", "-c", "tty; stty size; read line; stty size; echo got-$line"];
    let mut command = containerd.run_command(&["--rm", "--tty"], &id, &script);
    let mut terminal = OnTerminal::start(&mut command, 31, 99);
    terminal.await_text("/dev/pts/");
    terminal.await_text("31 99");
    terminal.resize(12, 34);
    std::thread::sleep(std::time::Duration::from_millis(300));
    terminal.type_in("key\r");
    terminal.await_text("12 34");
    terminal.await_text("got-key");
    assert!(crate::common::wait(&mut terminal.child, crate::common::LIMIT).unwrap().success());
    let log = containerd.path("out");
    let uri = format!("file://{}", log.display());
    let id = unique("log");
    let flags = ["--detach", "--log-uri", &uri];
    finish(&mut containerd.run_command(&flags, &id, &["sh", "-c", "echo logged"]), b"").ok();
    eventually("it ends", || containerd.task(&id).is_some_and(|(_, state)| state == "STOPPED"));
    assert_eq!(std::fs::read_to_string(log).unwrap(), "logged\n");
}

#[test]
fn files_land_in_the_snapshot_and_the_hosts_are_bound() {
    let containerd = Containerd::start("");
    let data = containerd.path("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("given"), "from the host").unwrap();
    let single = containerd.path("single");
    std::fs::write(&single, "one").unwrap();
    let mounts = [
        format!("type=bind,src={},dst=/data,options=rbind:rw", data.display()),
        format!("type=bind,src={},dst=/fixed,options=rbind:ro", data.display()),
        format!("type=bind,src={},dst=/below,options=rbind:rro", data.display()),
        format!("type=bind,src={},dst=/etc/one,options=rbind:ro", single.display()),
    ];
    let flags: Vec<&str> = mounts.iter().flat_map(|mount| ["--mount", mount]).collect();
    let script = "cat /data/given /etc/one; echo made > /data/made; echo x > /left; mkdir /d; \
                  ln -s left /link; ! touch /fixed/x 2>/dev/null; ! touch /below/x 2>/dev/null; \
                  ! touch /etc/one 2>/dev/null";
    let id = unique("files");
    let mut command = containerd.run_command(&flags, &id, &["sh", "-ec", script]);
    assert_eq!(finish(&mut command, b"").ok().text(), "from the hostone");
    assert_eq!(std::fs::read_to_string(data.join("made")).unwrap(), "made\n");
    assert!(!data.join("x").exists());
    // Whoever looks at the snapshot finds it.
    let at = containerd.path("snapshot");
    std::fs::create_dir(&at).unwrap();
    let mount = containerd.ctr(&["snapshots", "mounts", text(&at), &id]).ok();
    let mut shell = std::process::Command::new("sh");
    let script =
        format!("{} && cat {1}/left && readlink {1}/link; umount {1}", mount.text(), at.display());
    let mounted = finish(shell.args(["-c", &script]), b"").ok();
    assert_eq!(mounted.text(), "x\nleft");
    let socket =
        format!("type=bind,src={},dst=/s,options=rbind:rw", containerd.path("sock").display());
    let refused = containerd.shell(&["--mount", &socket], "true");
    assert!(refused.code != 0 && refused.stderr.contains("no cell reaches"), "{}", refused.stderr);
    for word in ["readonly", "RO", "rrw", "idmap"] {
        let mount = format!("type=bind,src={},dst=/s,options=rbind:{word}", data.display());
        let refused = containerd.shell(&["--mount", &mount], "touch /s/x");
        let names = refused.stderr.contains(&format!("the option {word} of the bind on /s"));
        assert!(refused.code != 0 && names, "{word}: {}", refused.stderr);
    }
    assert!(!data.join("x").exists());
}

#[test]
fn a_container_is_created_before_it_starts() {
    let containerd = Containerd::start("");
    let id = unique("made");
    let fixed = ["container", "create", "--runtime", "io.containerd.exocell.v1"];
    let more = [NAME, &id, "uname", "-s"];
    containerd.ctr(&[&fixed[..], &more].concat()).ok();
    let mut task = Started::new(&mut containerd.command(&["task", "start", &id]));
    task.close_stdin();
    let task = task.finish(crate::common::LIMIT).unwrap().ok();
    assert_eq!(task.text(), "Linux");
}

#[test]
fn programs_run_beside_the_containers_own() {
    let containerd = Containerd::start("");
    let id = containerd.waits(&["--memory-limit", "67108864"]);
    let (pid, state) = containerd.task(&id).unwrap();
    assert!(state == "RUNNING" && namespace(pid).is_some(), "{state} {pid}");
    assert_eq!(containerd.exec(&id, "cat /proc/1/comm; exit 3").exited(3).text(), "sleep");
    assert_eq!(containerd.exec(&id, "kill -9 $$").code, 137);
    let own = ["task", "exec", "--exec-id", "own", "--user", "7:8", "--cwd", "/tmp"];
    let said = containerd.ctr(&[&own[..], &[&id, "sh", "-c", "pwd; id -u; id -g"]].concat()).ok();
    assert_eq!(said.text(), "/tmp\n7\n8");
    let mut first = Started::new(&mut containerd.command(&[
        "task",
        "exec",
        "--exec-id",
        "first",
        &id,
        "sleep",
        "1000",
    ]));
    let runs = "cat /proc/[0-9]*/comm | { n=0; while read c; do [ $c = sleep ] && n=$((n+1)); done; echo $n; }";
    eventually("it runs", || containerd.exec(&id, runs).ok().text() == "2");
    containerd.ctr(&["task", "kill", "--exec-id", "first", "--signal", "SIGTERM", &id]).ok();
    first.close_stdin();
    assert_eq!(first.finish(crate::common::LIMIT).unwrap().code, 143);
    let mut command = containerd.command(&[
        "task",
        "exec",
        "--tty",
        "--exec-id",
        "t",
        &id,
        "sh",
        "-c",
        "tty; read line; stty size",
    ]);
    let mut terminal = OnTerminal::start(&mut command, 20, 77);
    terminal.await_text("/dev/pts/");
    // The client tells the size when the program runs.
    std::thread::sleep(std::time::Duration::from_millis(300));
    terminal.type_in("key\r");
    terminal.await_text("20 77");
    let listed = containerd.ctr(&["task", "ps", &id]).ok();
    let listed: Vec<_> =
        listed.text().lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(listed, [pid.to_string()]);
    let figures = containerd.ctr(&["task", "metrics", "--format", "json", &id]).ok().json();
    assert!(figures["memory"]["usage"].as_u64().is_some_and(|bytes| bytes > 0), "{figures}");
    assert_eq!(figures["memory"]["usage_limit"], 67_108_864, "{figures}");
    assert!(figures["pids"]["current"].as_u64().is_some_and(|count| count > 0), "{figures}");
    // Nobody runs while it is paused, and it goes on after.
    containerd.ctr(&["task", "pause", &id]).ok();
    assert_eq!(containerd.task(&id).unwrap().1, "PAUSED");
    let refused = containerd.exec(&id, "true");
    assert!(refused.code != 0 && refused.stderr.contains("paused"), "{}", refused.stderr);
    containerd.ctr(&["task", "resume", &id]).ok();
    containerd.exec(&id, "true").ok();
    let refused = containerd.ctr(&["task", "checkpoint", &id]);
    assert!(refused.code != 0 && refused.stderr.contains("checkpoint"), "{}", refused.stderr);
    containerd.ctr(&["task", "kill", "--signal", "SIGTERM", &id]).ok();
    eventually("it ends", || containerd.task(&id).is_some_and(|(_, state)| state == "STOPPED"));
    containerd.remove(&id);
    eventually("its cell is gone", || namespace(pid).is_none());
}

#[test]
fn events_come_in_their_order() {
    let containerd = Containerd::start("");
    let mut events = Started::new(&mut containerd.command(&["events"]));
    std::thread::sleep(std::time::Duration::from_millis(500));
    let id = containerd.waits(&[]);
    containerd.exec(&id, "exit 4").exited(4);
    containerd.remove(&id);
    std::thread::sleep(std::time::Duration::from_millis(500));
    events.child.kill().unwrap();
    let said = events.finish(crate::common::LIMIT).unwrap();
    let topic = |line: &str| {
        line.split_whitespace().find(|word| word.starts_with("/tasks/")).map(str::to_owned)
    };
    let topics: Vec<String> = said.text().lines().filter_map(topic).collect();
    let expected = [
        "/tasks/create",
        "/tasks/start",
        "/tasks/exec-added",
        "/tasks/exec-started",
        "/tasks/exit",
        "/tasks/exit",
        "/tasks/delete",
    ];
    assert_eq!(topics, expected, "{}", said.text());
}

/// Nothing of the cell with the processes `of` is left, nor of containerd's task.
#[track_caller]
fn is_gone(containerd: &Containerd, id: &str, of: &host::Namespace) {
    eventually("its processes are gone", || processes(of).is_empty());
    eventually("its task is gone", || {
        containerd.task(id).is_none_or(|(_, state)| state == "STOPPED")
    });
    containerd.ctr(&["task", "delete", "--force", id]);
    let left = |what: &str| {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(text(containerd.folder())), "{what}: {mounts}");
        let cells = crate::common::run(["ps", "--all", "--format", "{{.Names}}"]).ok();
        assert!(!cells.text().contains(id), "{what}: {}", cells.text());
    };
    left(id);
    assert!(containerd.shim(id).is_none());
}

#[test]
fn nothing_is_left_of_what_is_killed() {
    let mut containerd = Containerd::start("");
    // The shim.
    let id = containerd.waits(&[]);
    let (pid, _) = containerd.task(&id).unwrap();
    let own = namespace(pid).unwrap();
    kill(containerd.shim(&id).expect("a shim"));
    is_gone(&containerd, &id, &own);
    // The cell's supervisor: containerd hears of the end.
    let id = containerd.waits(&[]);
    let (pid, _) = containerd.task(&id).unwrap();
    let own = namespace(pid).unwrap();
    kill(pid);
    eventually("its end is told", || {
        containerd.task(&id).is_some_and(|(_, state)| state == "STOPPED")
    });
    containerd.ctr(&["task", "delete", &id]).ok();
    is_gone(&containerd, &id, &own);
    // containerd: the container runs on, and is found again.
    let id = containerd.waits(&[]);
    let (pid, _) = containerd.task(&id).unwrap();
    let own = namespace(pid).unwrap();
    containerd.kill();
    assert!(!processes(&own).is_empty());
    containerd.resume();
    assert_eq!(containerd.task(&id), Some((pid, "RUNNING".to_owned())));
    containerd.exec(&id, "exit 5").exited(5);
    containerd.remove(&id);
    is_gone(&containerd, &id, &own);
}

#[test]
fn what_a_cell_does_not_do_is_refused_by_name() {
    let containerd = Containerd::start("");
    for (flags, word) in [
        (&["--net-host"][..], "hostNetwork"),
        (&["--with-ns", "pid:/proc/1/ns/pid"], "namespace of process 1"),
        (&["--with-ns", "network:/proc/self/ns/net"], "hostNetwork"),
        (&["--device", "/dev/null"], "never"),
    ] {
        let refused = containerd.shell(flags, "true");
        if word == "never" {
            refused.ok();
            continue;
        }
        assert!(refused.code != 0 && refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
    assert!(containerd.ctr(&["task", "ls", "-q"]).ok().text().is_empty());
    // A profile is carried out, unless the operator has it left out.
    let said = containerd.shell(&["--seccomp"], "cat /proc/self/status").ok();
    assert!(said.text().contains("Seccomp:\t2"), "{}", said.text());
    let lenient = Containerd::start("leave_out = [\"seccomp\"]\nmemory_mib = 256\n");
    let said = lenient.shell(&["--seccomp"], "cat /proc/self/status").ok();
    assert!(said.text().contains("Seccomp:\t0"), "{}", said.text());
}

#[test]
fn the_runtime_is_installed_and_taken_away_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (config, bin) = (path("config.toml"), path("bin"));
    std::fs::create_dir(&bin).unwrap();
    let own = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/x\"\n";
    std::fs::write(&config, own).unwrap();
    let run = |words: &[&str]| {
        let places = ["--config", text(&config), "--bin-dir", text(&bin)];
        crate::common::run([&["containerd"], words, &places].concat())
    };
    let link = bin.join("containerd-shim-exocell-v1");
    let said = run(&["install", "--dry-run"]).ok();
    assert!(said.text().contains("would link") && !link.exists(), "{}", said.text());
    assert!(run(&["status"]).exited(1).text().contains("exocell containerd install"));
    run(&["install"]).ok();
    run(&["install"]).ok();
    run(&["status"]).ok();
    let mut version = std::process::Command::new(&link);
    let said = finish(version.arg("-v"), b"").ok();
    assert!(said.text().starts_with("containerd-shim-exocell-v1:"), "{}", said.text());
    // As containerd itself reads it.
    let mut dump = std::process::Command::new("containerd");
    let said = finish(dump.arg("--config").arg(&config).args(["config", "dump"]), b"").ok();
    for line in ["runtime_type = \"io.containerd.exocell.v1\"", "bin_dir = \"/x\""] {
        assert!(said.text().contains(line), "{line}: {}", said.text());
    }
    run(&["uninstall"]).ok();
    assert!(!link.exists());
    assert_eq!(std::fs::read_to_string(&config).unwrap(), own);
}

/// A client of the shim of container `id`, by the newer name of its service.
fn client(containerd: &Containerd, id: &str) -> TaskClient {
    let address = std::fs::read_to_string(containerd.bundle(id).join("address")).unwrap();
    TaskClient::new(Client::connect(&address).unwrap())
}

#[test]
fn the_newer_task_service_is_the_same() {
    let containerd = Containerd::start("");
    let id = containerd.waits(&["--memory-limit", "67108864"]);
    let (task, none) = (client(&containerd, &id), Context::default);
    let state = task.state(none(), &StateRequest { id: id.clone(), ..Default::default() }).unwrap();
    assert_eq!(
        (state.pid as i32, state.status()),
        (containerd.task(&id).unwrap().0, Status::RUNNING)
    );
    let update = |limit: u64| {
        let text = format!(r#"{{"memory": {{"limit": {limit}}}, "pids": {{"limit": 77}}}}"#);
        let resources = Any { value: text.into_bytes(), ..Any::default() };
        let resources = MessageField::some(resources);
        task.update(none(), &UpdateTaskRequest { id: id.clone(), resources, ..Default::default() })
    };
    update(50 << 20).unwrap();
    let figures = containerd.ctr(&["task", "metrics", "--format", "json", &id]).ok().json();
    assert_eq!(
        (&figures["memory"]["usage_limit"], &figures["pids"]["limit"]),
        (&(50 << 20).into(), &77.into())
    );
    let error = update(1 << 40).unwrap_err().to_string();
    assert!(error.contains("memory limit"), "{error}");
    let checkpoint = CheckpointTaskRequest { id: id.clone(), ..Default::default() };
    let error = task.checkpoint(none(), &checkpoint).unwrap_err();
    assert!(
        matches!(&error, Error::RpcStatus(status) if status.code() == Code::UNIMPLEMENTED),
        "{error}"
    );
    let error = task.delete(none(), &DeleteRequest { id: id.clone(), ..Default::default() });
    let error = error.unwrap_err();
    assert!(
        matches!(&error, Error::RpcStatus(status) if status.code() == Code::FAILED_PRECONDITION)
    );
    let unknown = StateRequest { id: "unknown".to_owned(), ..Default::default() };
    let error = task.state(none(), &unknown).unwrap_err();
    assert!(
        matches!(&error, Error::RpcStatus(status) if status.code() == Code::NOT_FOUND),
        "{error}"
    );
    containerd.remove(&id);
}

#[test]
fn containers_of_a_pod_are_in_one_guest() {
    let containerd = Containerd::start("");
    let id = containerd.waits(&[]);
    let (task, none) = (client(&containerd, &id), Context::default);
    let (pid, _) = containerd.task(&id).unwrap();
    // As the CRI plugin makes the second: by the first's shim, in the namespaces of its pid.
    let bundle = containerd.path("second");
    let root = crate::common::small::tree();
    std::fs::create_dir(&bundle).unwrap();
    let text = std::fs::read(containerd.bundle(&id).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
    config["root"]["path"] = root.path().to_str().unwrap().into();
    config["hostname"] = "".into();
    let script =
        "read name < /proc/sys/kernel/hostname; echo $name > /said; test -e /proc/1 && exit 6";
    config["process"]["args"] = serde_json::json!(["sh", "-c", script]);
    for namespace in config["linux"]["namespaces"].as_array_mut().unwrap() {
        if let Some(kind @ ("ipc" | "uts")) = namespace["type"].as_str() {
            namespace["path"] = format!("/proc/{pid}/ns/{kind}").into();
        }
    }
    let write = |config: &serde_json::Value| {
        std::fs::write(bundle.join("config.json"), config.to_string()).unwrap();
    };
    write(&config);
    let second = "second".to_owned();
    let create = CreateTaskRequest {
        id: second.clone(),
        bundle: bundle.display().to_string(),
        ..Default::default()
    };
    let created = task.create(none(), &create).unwrap();
    assert_eq!(created.pid as i32, pid);
    let state = || {
        let state = task.state(none(), &StateRequest { id: second.clone(), ..Default::default() });
        state.unwrap().status()
    };
    assert_eq!(state(), Status::CREATED);
    assert!(!root.path().join("said").exists());
    task.start(none(), &StartRequest { id: second.clone(), ..Default::default() }).unwrap();
    let ended =
        task.wait(none(), &WaitRequest { id: second.clone(), ..Default::default() }).unwrap();
    assert_eq!((ended.exit_status, state()), (6, Status::STOPPED));
    task.delete(none(), &DeleteRequest { id: second.clone(), ..Default::default() }).unwrap();
    assert_eq!(std::fs::read_to_string(root.path().join("said")).unwrap(), format!("{id}\n"));
    assert!(!root.path().join("made").exists());
    // The pod runs on.
    containerd.exec(&id, "true").ok();
    // One that was never started is killed and deleted.
    task.create(none(), &create).unwrap();
    let kill = KillRequest { id: second.clone(), signal: 9, ..Default::default() };
    task.kill(none(), &kill).unwrap();
    assert_eq!(state(), Status::STOPPED);
    let deleted = task.delete(none(), &DeleteRequest { id: second.clone(), ..Default::default() });
    assert_eq!(deleted.unwrap().exit_status, 137);
    // Nor is one in the namespaces of another process.
    config["linux"]["namespaces"][0] = serde_json::json!({ "type": "pid" });
    for namespace in config["linux"]["namespaces"].as_array_mut().unwrap() {
        if namespace["type"] == "ipc" {
            namespace["path"] = "/proc/1/ns/ipc".into();
        }
    }
    write(&config);
    let error = task.create(none(), &create).unwrap_err().to_string();
    assert!(error.contains("its own pod"), "{error}");
    containerd.remove(&id);
}

/// A network namespace with an interface that leads to the host, as CNI makes them.
struct Pod {
    name: String,
    host: Ipv4Addr,
    guest: Ipv4Addr,
}

impl Pod {
    fn make() -> Self {
        let number = std::process::id() % 200;
        let name = format!("exopod{number}");
        let (host, guest) =
            (Ipv4Addr::new(10, 211, number as u8, 1), Ipv4Addr::new(10, 211, number as u8, 2));
        let outside = format!("exov{number}");
        let script = format!(
            "ip netns add {name} && ip link add {outside} type veth peer name eth0 netns {name} && \
             ip address add {host}/24 dev {outside} && ip link set {outside} up && \
             ip -n {name} address add {guest}/24 dev eth0 && ip -n {name} link set eth0 up && \
             ip -n {name} route add default via {host}"
        );
        let pod = Self { name, host, guest };
        Self::shell(&script);
        pod
    }

    #[track_caller]
    fn shell(script: &str) {
        let script = format!("PATH=$PATH:/usr/sbin:/sbin; {script}");
        finish(std::process::Command::new("sh").args(["-c", &script]), b"").ok();
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // The interface goes with it.
        Self::shell(&format!("ip netns delete {}", self.name));
    }
}

#[test]
fn a_network_namespace_of_the_hosts_is_the_guests() {
    let containerd = Containerd::start("");
    let pod = Pod::make();
    let path = format!("network:/run/netns/{}", pod.name);
    let id = containerd.waits(&["--with-ns", &path]);
    // The guest itself says that nobody listens: packets pass both ways.
    let socket = UdpSocket::bind((pod.host, 0)).unwrap();
    socket.connect((pod.guest, 9)).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_millis(500))).unwrap();
    eventually("the guest answers", || {
        let _ = socket.send(b"is anybody there");
        matches!(socket.recv(&mut [0; 8]), Err(e) if e.kind() == ErrorKind::ConnectionRefused)
    });
    let routes = containerd.exec(&id, "cat /proc/net/route /proc/net/fib_trie").ok();
    assert!(routes.text().contains(&pod.guest.to_string()), "{}", routes.text());
    containerd.remove(&id);
    let left = finish(
        std::process::Command::new("sh")
            .args(["-c", &format!("PATH=$PATH:/usr/sbin:/sbin ip -n {} link", pod.name)]),
        b"",
    );
    assert!(!left.ok().text().contains("exocell0"));
}
