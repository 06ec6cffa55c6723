//! Pods of cells by the Container Runtime Interface: Debian's containerd with CNI's plugins, driven
//! by `crictl`.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::json;

use crate::common::cri::Cri;
use crate::common::host::{kill, namespace, processes};
use crate::common::pty::OnTerminal;
use crate::common::{eventually, finish, until};

/// What an HTTP server at `address` answers.
fn fetched(address: (Ipv4Addr, u16)) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address.into(), Duration::from_secs(5))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    Ok(said)
}

#[test]
fn containers_of_a_pod_share_what_kubernetes_says() {
    let Some(cri) = Cri::start("") else { return };
    let pod = cri.pod(json!({
        "dns_config": { "servers": ["192.0.2.53"], "searches": ["svc.test"], "options": ["ndots:2"] },
    }));
    let address = cri.address(&pod);
    let web = cri.container(&pod, "echo on >/dev/shm/mark; httpd -f -h /www -p 8080", json!({}));
    // The host reaches the pod, and the pod the host.
    eventually("the pod answers", || {
        fetched((address, 8080)).is_ok_and(|said| said.ends_with("from a pod\n"))
    });
    let listener = TcpListener::bind((cri.gateway, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let answers = std::thread::spawn(move || {
        let (mut stream, peer) = listener.accept().unwrap();
        stream.write_all(b"from the host\n").unwrap();
        peer.ip()
    });
    let script = format!(
        "cat /dev/shm/mark; hostname; wget -qO- http://127.0.0.1:8080/; cat /etc/resolv.conf; \
         ls -d /proc/[0-9]* | wc -l; nc {} {port} </dev/null",
        cri.gateway
    );
    let said = cri.said(&pod, &script, json!({}));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(
        lines,
        [
            "on",
            "of-pod",
            "from a pod",
            "search svc.test",
            "nameserver 192.0.2.53",
            "options ndots:2",
            // The shell and the programs of its pipe.
            "3",
            "from the host"
        ]
    );
    assert_eq!(answers.join().unwrap(), address);
    // What is forwarded comes to the loopback, where a program may listen that nobody else reaches.
    cri.crictl(&["exec", &web, "sh", "-c", "httpd -h /www -p 127.0.0.1:9090"]).ok();
    let mut forwards = cri.command(&["port-forward", &pod, ":9090"]);
    let mut forwards = OnTerminal::start(&mut forwards, 20, 100);
    forwards.await_text("Forwarding from 127.0.0.1:");
    let shown = forwards.shown();
    let local = shown.split("127.0.0.1:").nth(1).unwrap().split(' ').next().unwrap();
    let said = fetched((Ipv4Addr::LOCALHOST, local.parse().unwrap())).unwrap();
    assert!(said.ends_with("from a pod\n"), "{said}");
    forwards.child.kill().unwrap();
    forwards.child.wait().unwrap();
    assert!(fetched((address, 9090)).is_err());
    // A container that is there no more leaves the pod as it is.
    cri.crictl(&["stop", "--timeout", "1", &web]).ok();
    cri.crictl(&["rm", &web]).ok();
    cri.said(&pod, "true", json!({}));
    cri.crictl(&["stopp", &pod]).ok();
    assert_eq!(cri.crictl(&["pods", "--state", "ready", "-q"]).ok().text(), "");
    cri.crictl(&["rmp", &pod]).ok();
    assert_eq!(cri.crictl(&["ps", "-aq"]).ok().text(), "");
}

#[test]
fn programs_are_executed_attached_to_and_counted() {
    let Some(cri) = Cri::start("") else { return };
    let pod = cri.pod(json!({ "linux": { "cgroup_parent": "/exocell-test-cri/pod" } }));
    let reads = json!({ "stdin": true, "stdin_once": false, "tty": false });
    let script = "trap 'exit 7' TERM; echo ready; while read line; do echo got-$line; done";
    let id = cri.container(&pod, script, reads);
    let told = cri.crictl(&["exec", "--sync", &id, "sh", "-c", "echo out; exit 3"]);
    assert!(told.code != 0 && told.stderr.contains("exited with 3"), "{}", told.stderr);
    let said = finish(&mut cri.command(&["exec", "-i", &id, "cat"]), b"in and out").ok();
    assert_eq!(said.text(), "in and out");
    let mut command = cri.command(&["exec", "-it", &id, "sh", "-c", "tty; read a; echo is-$a"]);
    let mut terminal = OnTerminal::start(&mut command, 20, 70);
    terminal.await_text("/dev/pts/");
    terminal.type_in("typed\r");
    terminal.await_text("is-typed");
    assert!(crate::common::wait(&mut terminal.child, crate::common::LIMIT).unwrap().success());
    let mut attached = cri.started(&["attach", "-i", &id]);
    attached.write(b"line\n");
    eventually("it is read", || cri.crictl(&["logs", &id]).text().contains("got-line"));
    attached.child.kill().unwrap();
    attached.finish(crate::common::LIMIT);
    let figures = cri.crictl(&["stats", "-o", "json", &id]).ok().json();
    let used = &figures["stats"][0]["memory"]["workingSetBytes"]["value"];
    assert!(used.as_str().is_some_and(|bytes| bytes.parse::<u64>().unwrap() > 0), "{figures}");
    // The host counts the pod's processes in the group that is named for it.
    let figures = cri.crictl(&["statsp", "-o", "json", "--id", &pod]).ok().json();
    let linux = &figures["stats"][0]["linux"];
    for (name, value) in [
        ("memory", &linux["memory"]["workingSetBytes"]["value"]),
        ("processor", &linux["cpu"]["usageCoreNanoSeconds"]["value"]),
    ] {
        let amount = value.as_str().and_then(|text| text.parse::<u64>().ok());
        assert!(amount > Some(1 << 20), "{name}: {figures}");
    }
    cri.crictl(&["update", "--memory", "33554432", &id]).ok();
    let limit = cri.exec(&id, "cat /sys/fs/cgroup/memory.max").ok();
    assert_eq!(limit.text(), "33554432");
    cri.crictl(&["stop", "--timeout", "20", &id]).ok();
    let status = cri.status(&id);
    assert_eq!((&status["exitCode"], &status["reason"]), (&json!(7), &json!("Error")));
    cri.crictl(&["rmp", "-f", &pod]).ok();
    let left = |at: &str| std::path::Path::new(at).join("exocell-test-cri/pod").join(&pod).exists();
    let hierarchies = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpu"];
    assert!(!hierarchies.into_iter().any(left));
}

#[test]
fn volumes_are_as_kubernetes_makes_them() {
    let Some(cri) = Cri::start("") else { return };
    let at = cri.containerd.path("volumes");
    let path = |name: &str| at.join(name);
    for folder in ["map/..1", "map/..2", "empty"] {
        std::fs::create_dir_all(path(folder)).unwrap();
    }
    for (name, text) in
        [("map/..1/key", "one"), ("map/..2/key", "two"), ("sub", "sub"), ("end", "")]
    {
        std::fs::write(path(name), text).unwrap();
    }
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, path(name)).unwrap();
    link("..1", "map/..data");
    link("..data/key", "map/key");
    let mount = |to: &str, name: &str, fixed: bool| json!({ "container_path": to, "host_path": path(name), "readonly": fixed });
    let mounts = json!({ "mounts": [
        mount("/map", "map", true),
        mount("/etc/sub.conf", "sub", true),
        mount("/dev/termination-log", "end", false),
        mount("/empty", "empty", false),
        mount("/fixed", "empty", true),
    ] });
    let pod = cri.pod(json!({}));
    let script = "cat /map/key /etc/sub.conf; echo kept > /empty/file; cat /fixed/file; \
                  ! touch /fixed/x /map/x 2>/dev/null; echo why > /dev/termination-log; \
                  while [ $(cat /map/key) != two ]; do sleep 0.1; done; echo changed";
    let id = cri.container(&pod, script, mounts);
    eventually("it reads the first", || cri.crictl(&["logs", &id]).text().contains("kept"));
    // As kubelet swaps a new version in.
    link("..2", "map/..new");
    std::fs::rename(path("map/..new"), path("map/..data")).unwrap();
    eventually("it ends", || cri.state(&id) == "CONTAINER_EXITED");
    assert_eq!(cri.crictl(&["logs", &id]).ok().text(), "onesubkept\nchanged");
    let read = |name: &str| std::fs::read_to_string(path(name)).unwrap();
    assert_eq!((read("end"), read("empty/file")), ("why\n".to_owned(), "kept\n".to_owned()));
}

/// Mounts of a test's own, which others may follow.
struct Shared(std::path::PathBuf);

impl Shared {
    fn make(at: &std::path::Path) -> Self {
        use nix::mount::{MsFlags, mount};
        let none = None::<&str>;
        std::fs::create_dir_all(at).unwrap();
        mount(Some("test"), at, Some("tmpfs"), MsFlags::empty(), none).unwrap();
        mount(none, at, none, MsFlags::MS_SHARED, none).unwrap();
        Self(at.to_owned())
    }

    fn mount_below(&self, name: &str) {
        let at = self.0.join(name);
        std::fs::create_dir(&at).unwrap();
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("later"), &at, Some("tmpfs"), flags, None::<&str>).unwrap();
        std::fs::write(at.join("file"), "later").unwrap();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for name in ["late", ""] {
            let _ = nix::mount::umount2(&self.0.join(name), nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

#[test]
fn what_the_host_mounts_later_comes_where_it_is_asked_for() {
    let Some(cri) = Cri::start("") else { return };
    let shared = Shared::make(&cri.containerd.path("shared"));
    let mount = |to: &str, propagation: u8| json!({ "container_path": to, "host_path": shared.0, "propagation": propagation });
    let pod = cri.pod(json!({}));
    let stays = cri.container(
        &pod,
        "echo begun; until test -e /stays/end; do sleep 0.1; done; ls /stays/late",
        json!({ "mounts": [mount("/stays", 0)] }),
    );
    let pod = cri.pod(json!({}));
    let follows = cri.container(
        &pod,
        "echo begun; until cat /follows/late/file 2>/dev/null; do sleep 0.1; done",
        json!({ "mounts": [mount("/follows", 1)] }),
    );
    for id in [&stays, &follows] {
        eventually("it has begun", || cri.crictl(&["logs", id]).text().contains("begun"));
    }
    shared.mount_below("late");
    eventually("it ends", || cri.state(&follows) == "CONTAINER_EXITED");
    assert_eq!(cri.crictl(&["logs", &follows]).ok().text(), "begun\nlater");
    std::fs::write(shared.0.join("end"), "").unwrap();
    eventually("it ends", || cri.state(&stays) == "CONTAINER_EXITED");
    assert_eq!(cri.crictl(&["logs", &stays]).ok().text(), "begun");
    // What a guest mounts stays in it.
    let both = json!({ "mounts": [mount("/both", 2)] });
    let refused = cri.create(&pod, "true", both);
    let refused = cri.crictl(&["start", &refused]);
    assert!(refused.code != 0 && refused.stderr.contains("stay in it"), "{}", refused.stderr);
}

#[test]
fn a_security_context_is_kept_to() {
    let Some(cri) = Cri::start("") else { return };
    let pod = cri.pod(json!({ "linux": {
        "sysctls": { "net.ipv4.ip_unprivileged_port_start": "80", "kernel.shm_rmid_forced": "1" },
        "security_context": { "namespace_options": { "pid": 0 } },
    } }));
    let held = json!({ "linux": { "security_context": {
        "namespace_options": { "pid": 0 },
        "run_as_user": { "value": 1000 }, "run_as_group": { "value": 1000 },
        "supplemental_groups": [3000],
        "readonly_rootfs": true, "no_new_privs": true,
        "capabilities": { "drop_capabilities": ["ALL"] },
        "seccomp": { "profile_type": 0 },
        "masked_paths": ["/proc/keys"], "readonly_paths": ["/proc/sys"],
    } } });
    let script = "id; touch /x 2>/dev/null || echo fixed; touch /dev/shm/x && echo shared; \
                  grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status; \
                  cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/keys; \
                  unshare -U true 2>/dev/null || echo held; cat /proc/1/comm";
    let said = cri.said(&pod, script, held);
    let lines: Vec<String> = said.lines().map(|line| line.replace('\t', " ")).collect();
    assert_eq!(
        lines,
        [
            "uid=1000(ann) gid=1000(ann) groups=1000(ann),2000(more),3000",
            "fixed",
            "shared",
            "CapBnd: 0000000000000000",
            "NoNewPrivs: 1",
            "Seccomp: 2",
            "80",
            "held",
            // The first of the pod's.
            "sleep",
        ]
    );
    // Its programs see those of the others, until they end with it.
    let see = json!({ "linux": { "security_context": {
        "namespace_options": { "pid": 0 }, "seccomp": { "profile_type": 0 },
    } } });
    let seen = cri.container(&pod, "sleep 4321 & sleep 1234", see.clone());
    let other = cri.container(&pod, "sleep 100000", see);
    let count = |what: &str| {
        let script = format!("ps -o args | grep -c '^sleep {what}$'");
        cri.exec(&other, &script).text().to_owned()
    };
    eventually("it is seen", || count("1234") == "1" && count("4321") == "1");
    let end = "kill -9 $(ps -o pid,args | awk '/sleep 1234$/ { print $1 }')";
    cri.exec(&other, end);
    eventually("it ends", || cri.state(&seen) == "CONTAINER_EXITED");
    eventually("all of it ends", || count("4321") == "0");
    for (context, word) in [
        (json!({ "namespace_options": { "network": 2 } }), "hostNetwork"),
        (json!({ "namespace_options": { "pid": 2 } }), "hostPID"),
    ] {
        let refused = cri.try_pod(json!({ "linux": { "security_context": context } }));
        assert!(refused.code != 0 && refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
}

#[test]
fn pods_outlive_containerd_and_end_with_their_shim() {
    let Some(mut cri) = Cri::start("") else { return };
    let pod = cri.pod(json!({}));
    let id = cri.container(&pod, "sleep 100000", json!({}));
    let pid = cri.crictl(&["inspect", &id]).ok().json()["info"]["pid"].as_i64().unwrap() as i32;
    let own = namespace(pid).unwrap();
    cri.containerd.kill();
    assert!(!processes(&own).is_empty());
    cri.containerd.resume();
    eventually("it is found again", || {
        let said = cri.crictl(&["ps", "-q"]);
        said.code == 0 && said.text() == id
    });
    cri.exec(&id, "true").ok();
    kill(cri.containerd.shim(&pod).expect("a shim"));
    eventually("its processes are gone", || processes(&own).is_empty());
    eventually("its end is known", || cri.state(&id) == "CONTAINER_EXITED");
    // Whoever keeps pods makes it anew.
    assert!(until(crate::common::LIMIT, || cri.crictl(&["rmp", "--force", &pod]).code == 0));
    let again = cri.pod(json!({}));
    assert_eq!(cri.said(&again, "echo anew", json!({})), "anew");
}
