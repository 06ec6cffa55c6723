//! Everyday Linux through the Docker API: the values are Docker's.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;

use crate::common::docker::{Server, says};
use crate::common::{IMAGE, finish, text};

#[test]
fn a_container_is_what_docker_would_make_it() {
    let server = Server::start();
    let flags = [
        "--cap-drop",
        "ALL",
        "--cap-add",
        "NET_RAW",
        "--security-opt",
        "no-new-privileges",
        "-u",
        "1000",
        "--group-add",
        "4242",
        "--ulimit",
        "nofile=100",
        "--shm-size",
        "1g",
        "--tmpfs",
        "/t:size=1m",
        "--domainname",
        "example.org",
        "--add-host",
        "db:10.0.0.7",
        "--device",
        "/dev/loop3",
        "--dns",
        "192.0.2.1",
        "--sysctl",
        "net.core.somaxconn=99",
        "--oom-score-adj",
        "100",
        "--cpus",
        "0.5",
        "--pids-limit",
        "77",
        "-m",
        "128m",
    ];
    let script = "grep -E '^(CapBnd|CapEff|NoNewPrivs)' /proc/self/status | tr -s '\\t' ' '; id -G; \
                  ulimit -n; df -k --output=size /dev/shm /t | tail -2 | tr -d ' '; \
                  cat /proc/sys/kernel/domainname /proc/sys/net/core/somaxconn \
                  /proc/self/oom_score_adj /proc/self/cgroup; cd /sys/fs/cgroup; \
                  cat cpu.max pids.max memory.max; getent hosts db | tr -s ' '; echo $$; \
                  stat -c %t:%T /dev/loop3";
    let made = server.run(&flags, &["sh", "-c", script]).ok();
    let expected = "CapEff: 0000000000000000\nCapBnd: 0000000000002000\nNoNewPrivs: 1\n0 4242\n100\n\
                    1048576\n1024\nexample.org\n99\n100\n0::/\n50000 100000\n77\n134217728\n\
                    10.0.0.7 db\n1\n7:3";
    assert_eq!(made.text(), expected);
    assert_eq!(made.stderr, "", "nothing is left out");
}

#[test]
fn privileged_is_root_of_its_own_kernel() {
    let server = Server::start();
    let script = "grep CapEff /proc/self/status; mount -t tmpfs none /mnt && echo mounted";
    let made = server.run(&["--privileged"], &["sh", "-c", script]).ok();
    assert_eq!(made.text(), "CapEff:\t000001ffffffffff\nmounted");
    server.idle("plain");
    let caps = |flags: &[&str]| {
        let args = [&["exec"], flags, &["plain", "grep", "CapEff", "/proc/self/status"]].concat();
        server.docker(&args).ok().text().to_owned()
    };
    assert_eq!(caps(&[]), "CapEff:\t00000000a80425fb");
    assert_eq!(caps(&["--privileged"]), "CapEff:\t000001ffffffffff");
}

#[test]
fn what_exec_writes_to_the_first_process_is_in_the_logs() {
    let server = Server::start();
    server.idle("c");
    server.docker(&["exec", "c", "sh", "-c", "echo x > /proc/1/fd/1"]).ok();
    says(&server, &["logs", "c"], "x");
    assert_eq!(server.docker(&["exec", "c", "cat", "/proc/1/comm"]).ok().text(), "sleep");
}

#[test]
fn an_end_for_lack_of_memory_is_told() {
    let server = Server::start();
    let hog = "l = []\nwhile True: l.append(bytearray(1 << 20))";
    let flags =
        ["run", "--network", "none", "--name", "hog", "-m", "96m", IMAGE, "python3", "-c", hog];
    let ended = server.docker(&flags).exited(137);
    assert!(ended.stderr.contains("memory"), "{}", ended.stderr);
    assert_eq!(server.inspect("hog", "{{.State.OOMKilled}} {{.State.ExitCode}}"), "true 137");
    server.docker(&["run", "--network", "none", "--name", "fine", IMAGE, "true"]).ok();
    assert_eq!(server.inspect("fine", "{{.State.OOMKilled}}"), "false");
}

#[test]
fn an_init_is_there_when_it_is_asked_for() {
    let server = Server::start();
    let comm = server.run(&["--init"], &["cat", "/proc/1/comm"]).ok();
    assert_eq!(comm.text(), "docker-init");
    server.run(&["--init"], &["sh", "-c", "kill -9 $$"]).exited(137);
    server.run(&[], &["sh", "-c", "kill -9 $$; exit 3"]).exited(3);
}

#[test]
fn what_no_cell_has_is_refused_by_its_name() {
    let server = Server::start();
    let refused = |flags: &[&str]| server.run(flags, &["true"]).exited(125).stderr;
    assert!(refused(&["--storage-opt", "size=1g"]).contains("StorageOpt"));
    assert!(refused(&["--cap-add", "SYS_GOD"]).contains("CAP_SYS_GOD"));
    assert!(refused(&["--device", "/dev/kvm"]).contains("no device of the host"));
    assert!(refused(&["--oom-kill-disable"]).contains("OomKillDisable"));
    assert!(refused(&["--cgroupns", "host"]).contains("cgroup namespace mode host"));
    let made = finish(&mut server.command(&["create", "--blkio-weight", "100", IMAGE]), b"");
    assert!(made.exited(1).stderr.contains("BlkioWeight"));
}

#[test]
fn a_server_logs_its_calls_as_the_journal_has_lines() {
    let mut server = Server::start();
    server.kill();
    let log = tempfile::NamedTempFile::new().expect("a file");
    let own = log.as_file().metadata().expect("its place");
    let mut command = server.exocell(&["--log-level", "debug"]);
    command.stderr(log.reopen().expect("the file"));
    command.env("JOURNAL_STREAM", format!("{}:{}", own.dev(), own.ino()));
    server.serve(command);
    server.run(&[], &["true"]).ok();
    server.docker(&["inspect", "nobody"]).exited(1);
    let said = std::fs::read_to_string(log.path()).expect("what it said");
    let has =
        |words: &[&str]| said.lines().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(has(&["<6>serves", "docker.sock"]), "{said}");
    assert!(has(&["<7>answered", "/containers/create", "status=201", "took_us="]), "{said}");
    assert!(has(&["<7>answered", "/containers/nobody/json", "status=404"]), "{said}");
    assert!(has(&["image opened", "took_us="]), "of the start too: {said}");
}

#[test]
fn lists_are_narrowed_by_both_doors_as_docker_does() {
    let server = Server::start();
    let small = server.small();
    server.docker(&["network", "create", "net"]).ok();
    let own = |args: &[&str]| finish(&mut server.exocell(args), b"");
    own(&["run", "-d", "--name", "own", "--network", "net", IMAGE, "sleep", "99"]).ok();
    server.docker(&["run", "-d", "--name", "other", &small, "sleep", "99"]).ok();
    let id = server.inspect("other", "{{.Image}}");
    let names = |filter: &str| {
        let said = server.docker(&["ps", "--filter", filter, "--format", "{{.Names}}"]).ok();
        let own = own(&["ps", "--filter", filter, "--format", "{{.Names}}"]).ok();
        assert_eq!(said.text(), own.text(), "{filter}");
        said.text().to_owned()
    };
    for wanted in [small.as_str(), &id, &id[7..19]] {
        assert_eq!(names(&format!("ancestor={wanted}")), "other", "{wanted}");
    }
    assert_eq!(names("ancestor=exocell/base"), "own");
    assert_eq!(names("ancestor=no/such"), "");
    assert_eq!(names("network=net"), "own");
    for wrong in ["status=nonsense", "health=well", "exited=often"] {
        let refused = server.docker(&["ps", "--filter", wrong]).exited(1);
        assert!(refused.stderr.contains("invalid filter"), "{}", refused.stderr);
        own(&["ps", "--filter", wrong]).exited(125).complains_of(&["invalid filter", wrong]);
    }

    let networks = own(&["network", "ls", "--format", "{{.Name}} {{.Driver}} {{.Internal}}"]).ok();
    assert_eq!(networks.text(), "net bridge false");
    let made = own(&["network", "create", "--attachable", "--opt", "a=b", "idle"]).ok();
    assert_eq!(
        made.stderr.trim(),
        "exocell: --attachable --opt a=b changes nothing of a network here"
    );
    let usage = server.docker(&["system", "df", "--format", "{{.Type}} {{.TotalCount}}"]).ok();
    assert!(usage.text().contains("Build Cache 0"), "{}", usage.text());
}

#[test]
fn what_the_image_says_is_run_is_shown() {
    let server = Server::start();
    let (small, image) = (server.small(), server.image("words"));
    let context = tempfile::tempdir().expect("a context");
    let dockerfile = format!("FROM {small}\nENTRYPOINT [\"sleep\"]\nCMD [\"98\"]\n");
    std::fs::write(context.path().join("Dockerfile"), dockerfile).expect("a file");
    server.docker(&["build", "-t", &image, text(context.path())]).ok();
    finish(&mut server.exocell(&["run", "-d", "--name", "own", &image]), b"").ok();
    server.docker(&["run", "-d", "--name", "other", &image, "97"]).ok();
    let shown = server.docker(&["ps", "--format", "{{.Names}} {{.Command}}"]).ok();
    assert_eq!(shown.text(), "other \"sleep 97\"\nown \"sleep 98\"");
    let ps = finish(&mut server.exocell(&["ps", "--format", "{{.Names}} {{.Command}}"]), b"").ok();
    assert_eq!(ps.text(), "own sleep 98\nother sleep 97");
    let kept = server.docker(&["system", "df", "--format", "{{.Type}} {{.TotalCount}}"]).ok();
    assert!(!kept.text().contains("Build Cache 0\n"), "{}", kept.text());
}

#[test]
fn diff_tells_what_a_container_has_changed() {
    let server = Server::start();
    let small = server.small();
    let create = ["create", "--network", "none", "--name", "c", &small, "sh", "-c"];
    let script = "echo x > /data/new; chmod 700 /src; rm /bin/ln; echo > /etc/own; echo >> /bin/cat; \
                  : >> /bin/ls; rm -r /tmp; sleep infinity";
    server.docker(&[&create[..], &[script]].concat()).ok();
    let diff = || {
        let told = server.docker(&["diff", "c"]).ok();
        let mut lines: Vec<String> = told.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(diff(), [""; 0], "nothing yet");
    server.docker(&["start", "c"]).ok();
    says(&server, &["exec", "c", "sh", "-c", "[ -e /tmp ] || echo gone"], "gone");
    let expected = [
        "A /data/new",
        "A /etc",
        "A /etc/own",
        "C /bin",
        "C /bin/cat",
        "C /data",
        "C /src",
        "D /bin/ln",
        "D /tmp",
    ];
    assert_eq!(diff(), expected);
    server.docker(&["stop", "-t", "0", "c"]).ok();
    assert_eq!(diff(), expected, "of one that has ended");
    let run = ["run", "-d", "--network", "container:own", "--name", "beside", &small, "sh", "-c"];
    server.docker(&["run", "-d", "--name", "own", "--network", "none", &small, "sleep", "99"]).ok();
    server.docker(&[&run[..], &["rm -r /src; echo > /src; sleep 99"]].concat()).ok();
    says(&server, &["exec", "beside", "sh", "-c", "[ -f /src ] && echo file"], "file");
    assert_eq!(server.docker(&["diff", "beside"]).ok().text(), "C /src");
    assert_eq!(server.docker(&["diff", "own"]).ok().text(), "");
    let fixed = ["run", "-d", "--network", "none", "--read-only", "--name", "fixed", IMAGE];
    server.docker(&[&fixed[..], &["sleep", "99"]].concat()).ok();
    assert_eq!(server.docker(&["diff", "fixed"]).ok().text(), "");
}

#[test]
fn a_directory_that_was_moved_or_made_anew_is_told_by_what_is_in_it() {
    let server = Server::start();
    let context = tempfile::tempdir().expect("a context");
    let image = server.image("tree");
    let made = "RUN mkdir -p /t/moved /t/anew && echo > /t/moved/x && echo > /t/anew/a";
    let dockerfile = format!("FROM {IMAGE}\n{made}\n");
    std::fs::write(context.path().join("Dockerfile"), dockerfile).expect("a file");
    server.docker(&["build", "-t", &image, text(context.path())]).ok();
    server.docker(&["run", "-d", "--network", "none", "--name", "c", &image, "sleep", "99"]).ok();
    let change = "mv /t/moved /t/there; rm -r /t/anew; mkdir /t/anew; echo > /t/anew/b";
    server.docker(&["exec", "c", "sh", "-c", change]).ok();
    let told = server.docker(&["diff", "c"]).ok();
    let mut lines: Vec<&str> = told.text().lines().collect();
    lines.sort_unstable();
    let expected = [
        "A /t/anew/b",
        "A /t/there",
        "A /t/there/x",
        "C /t",
        "C /t/anew",
        "D /t/anew/a",
        "D /t/moved",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn limits_are_changed_while_a_container_runs_and_for_its_next_start() {
    let server = Server::start();
    server.idle("c");
    let shown = || {
        let files =
            "cd /sys/fs/cgroup; cat cpu.max cpu.weight pids.max memory.max memory.low cpuset.cpus";
        let text = server.docker(&["exec", "c", "sh", "-c", files]).ok();
        text.text().lines().collect::<Vec<_>>().join(" ")
    };
    let update = |flags: &[&str]| server.docker(&[&["update"], flags, &["c"]].concat());
    let flags = ["--cpus", "0.5", "--cpu-shares", "512", "--pids-limit", "50", "-m", "128m"];
    update(&[&flags[..], &["--memory-reservation", "64m", "--cpuset-cpus", "0"]].concat()).ok();
    let expected = "50000 100000 20 50 134217728 67108864 0";
    assert_eq!(shown(), expected);
    let fields = "{{.HostConfig.NanoCpus}} {{.HostConfig.Memory}} {{.HostConfig.PidsLimit}}";
    assert_eq!(server.inspect("c", fields), "500000000 134217728 50");
    server.docker(&["restart", "-t", "0", "c"]).ok();
    assert_eq!(shown(), expected, "the next start has them, too");
    for (flags, word) in [
        (&["-m", "200m"][..], "more than the 134217728"),
        (&["--pids-limit", "60"], "more than the 50"),
        (&["--cpuset-cpus", "77"], "cpuset.cpus"),
        (&["--cpuset-mems", "0"], "CpusetMems"),
        (&["--cpus", "999"], "range of CPUs"),
    ] {
        let refused = update(flags).exited(1).stderr;
        assert!(refused.contains(word), "{flags:?}: {refused}");
    }
    update(&["--pids-limit", "40", "--cpu-quota", "-1"]).ok();
    assert_eq!(shown(), "max 100000 20 40 134217728 67108864 0");
    server.docker(&["stop", "-t", "0", "c"]).ok();
    update(&["-m", "200m", "--pids-limit", "60"]).ok();
    server.docker(&["start", "c"]).ok();
    assert_eq!(shown(), "max 100000 20 60 209715200 67108864 0");
}

#[test]
fn disks_are_told_of_and_what_nobody_uses_is_removed() {
    let server = Server::start();
    let small = server.small();
    let fixed = ["run", "--network", "none", "-v", "named:/data", "--name"];
    server.docker(&[&fixed[..], &["c", &small, "sh", "-c", "ls -l /bin > /data/x"]].concat()).ok();
    let shown = server.docker(&["ps", "-a", "--size", "--format", "{{.Size}}"]).ok();
    assert!(
        shown.text().contains("virtual") && !shown.text().starts_with("0B"),
        "{}",
        shown.text()
    );
    let sized = server.docker(&["inspect", "-s", "--format", "{{.SizeRw}}", "c"]).ok();
    assert!(sized.text().parse::<u64>().is_ok_and(|bytes| bytes > 0), "{}", sized.text());
    let df = server.docker(&["system", "df", "-v"]).ok();
    assert!(df.text().contains("named") && df.text().contains(&small[..10]), "{}", df.text());
    for filter in ["until=24h", "label=x", "label!=x"] {
        let kept = server.docker(&["container", "prune", "-f", "--filter", filter]).ok();
        let is_gone = kept.text().contains("Deleted Containers");
        assert_eq!(is_gone, filter == "label!=x", "{filter}: {}", kept.text());
    }
    let run = ["run", "--network", "none", "--name", "again", &small, "true"];
    server.docker(&run).ok();
    server.docker(&["network", "create", "idle"]).ok();
    let pruned = server.docker(&["system", "prune", "-f"]).ok();
    assert!(pruned.text().contains("idle") && pruned.text().contains("Total"), "{}", pruned.text());
    assert_eq!((server.files(), server.disks()), (vec![], vec![]));
    assert_eq!(server.docker(&["volume", "ls", "-q"]).ok().text(), "named");
}

#[test]
fn a_part_of_a_volume_is_mounted_and_no_link_leads_out_of_it() {
    let server = Server::start();
    let small = server.small();
    let fixed = ["run", "--rm", "--network", "none"];
    let run = |flags: &[&str], script: &str| {
        server.docker(&[&fixed[..], flags, &[&small, "sh", "-c", script]].concat())
    };
    let mkdir = [&fixed[..], &["-v", "vol:/v", IMAGE, "mkdir", "-p", "/v/a/b"]].concat();
    server.docker(&mkdir).ok();
    run(&["-v", "vol:/v"], "echo x > /v/a/b/f; ln -s /etc /v/out; ln -s b /v/a/in").ok();
    let part = |subpath: &str| format!("type=volume,src=vol,dst=/part,volume-subpath={subpath}");
    assert_eq!(run(&["--mount", &part("a/b")], "cat /part/f; echo y > /part/g").ok().text(), "x");
    assert_eq!(run(&["-v", "vol:/v"], "cat /v/a/b/g").ok().text(), "y");
    for (subpath, word) in [
        ("out", "no link is followed"),
        ("a/in", "no link is followed"),
        ("none", "none"),
        ("a/../..", "without .."),
    ] {
        let refused = run(&["--mount", &part(subpath)], "true").exited(125).stderr;
        assert!(refused.contains(word), "{subpath}: {refused}");
    }
}

#[test]
fn a_terminals_size_is_remembered_until_there_is_one() {
    let server = Server::start();
    let create = ["create", "-t", "--network", "none", "--name", "c", IMAGE, "stty", "size"];
    server.docker(&create).ok();
    let said = call(&server, "POST", "/containers/c/resize?h=33&w=99");
    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    server.docker(&["start", "-a", "c"]).ok();
    assert_eq!(server.docker(&["logs", "c"]).ok().text().trim_end(), "33 99");
    let refused = call(&server, "GET", "/containers/c/attach/ws");
    assert!(refused.contains("501") && refused.contains("websocket"), "{refused}");
}

/// What the server says to a call without a body.
fn call(server: &Server, method: &str, path: &str) -> String {
    let mut stream = server.connect();
    let head = format!("{method} /v1.47{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    write!(stream, "{head}Content-Length: 0\r\n\r\n").expect("it takes a call");
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("an answer");
    said
}

/// A registry that lets one user in, and has one manifest: its port.
fn registry() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            let mut asked = [0; 4096];
            let count = stream.read(&mut asked).unwrap_or(0);
            let asked = String::from_utf8_lossy(&asked[..count]).into_owned();
            // user:secret
            let is_known = asked.contains("Basic dXNlcjpzZWNyZXQ=");
            let (status, body) = match asked.split(' ').nth(1).unwrap_or_default() {
                _ if !is_known => ("401 x\r\nWWW-Authenticate: Basic realm=\"x\"", ""),
                path if path.ends_with("/manifests/1") => ("200 OK", INDEX),
                "/v2/" => ("200 OK", "{}"),
                _ => ("404 x", ""),
            };
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
            let _ = write!(stream, "{head}Content-Length: {length}\r\n\r\n{body}");
        }
    });
    port
}

/// An image of several platforms.
const INDEX: &str = r#"{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
    "manifests": [{"platform": {"architecture": "amd64", "os": "linux"}}]}"#;

#[test]
fn a_login_is_tried_and_an_image_is_looked_at_in_its_registry() {
    let server = Server::start();
    let registry = format!("127.0.0.1:{}", registry());
    let login = |password: &str| server.docker(&["login", "-u", "user", "-p", password, &registry]);
    assert!(login("wrong").exited(1).stderr.contains("401"));
    assert!(login("secret").ok().text().contains("Login Succeeded"));
    let path = format!("/distribution/{registry}/a/b:1/json");
    let refused = call(&server, "GET", &path);
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    // What the docker command sends for that user.
    let auth = "eyJ1c2VybmFtZSI6InVzZXIiLCJwYXNzd29yZCI6InNlY3JldCJ9";
    let mut stream = server.connect();
    let head = format!("GET /v1.47{path} HTTP/1.1\r\nHost: x\r\nX-Registry-Auth: {auth}\r\n");
    write!(stream, "{head}Connection: close\r\n\r\n").expect("it takes a call");
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("an answer");
    assert!(said.contains(r#""Platforms":[{"architecture":"amd64","os":"linux"}]"#), "{said}");
    assert!(said.contains(&format!("\"size\":{}", INDEX.len())), "{said}");
}

/// A call with a body of JSON; the answer as it came.
fn send(server: &Server, path: &str, body: &str) -> String {
    let mut stream = server.connect();
    let head = format!("POST /v1.47{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    let about = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    write!(stream, "{head}{about}\r\n{body}").expect("it takes a call");
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("an answer");
    said
}

#[test]
fn what_older_clients_say_is_warned_of_and_heard() {
    let server = Server::start();
    let body = format!(r#"{{"Image":"{IMAGE}","Cmd":["true"],"Dns":["192.0.2.1"],"Memory":1}}"#);
    let made = send(&server, "/containers/create?name=old", &body);
    assert!(made.starts_with("HTTP/1.1 201"), "{made}");
    assert!(made.contains("Dns is not used here") && made.contains("Memory is not"), "{made}");
    let volume = send(&server, "/volumes/create", r#"{"Name":"v","Mountpoint":"/"}"#);
    assert!(volume.starts_with("HTTP/1.1 201"), "{volume}");
    let image = server.image("committed");
    let (repo, tag) = image.split_once(':').expect("a tag");
    let path = format!("/commit?container=old&repo={repo}&tag={tag}");
    let body = r#"{"Cmd":["sh","-c","echo $A"],"Env":["A=1"],"Labels":{"l":"2"},"comment":"c"}"#;
    let made = send(&server, &path, body);
    assert!(made.starts_with("HTTP/1.1 201"), "{made}");
    let label = server.inspect(&image, "{{.Config.Labels.l}}");
    let ran = server.docker(&["run", "--rm", "--network", "none", &image]).ok();
    assert_eq!((label.as_str(), ran.text()), ("2", "1"));
    let refused = send(&server, &path, r#"{"HostConfig":{"Memory":1}}"#);
    assert!(refused.starts_with("HTTP/1.1 501") && refused.contains("HostConfig"), "{refused}");
}

#[test]
fn a_short_program_has_its_words_in_the_log_as_soon_as_it_is_started() {
    let server = Server::start();
    server.docker(&["run", "-d", "--network", "none", "--name", "c", IMAGE, "echo", "word"]).ok();
    assert_eq!(server.docker(&["logs", "c"]).ok().text(), "word");
}

#[test]
fn a_published_port_is_reached_at_the_gateway() {
    let server = Server::start();
    let flags = ["run", "-d", "--name", "c", "-p", "80", IMAGE, "sleep", "infinity"];
    server.docker(&flags).ok();
    let gateway = "{{.NetworkSettings.Gateway}} {{.NetworkSettings.Networks.bridge.Gateway}}";
    assert_eq!(server.inspect("c", gateway), "127.0.0.1 127.0.0.1");
    server.idle("none");
    assert_eq!(server.inspect("none", "{{.NetworkSettings.Gateway}}"), "");
}
