//! The docker command, as it is installed, against `exocell serve --docker`.

use std::fs;
use std::time::Duration;

use crate::common::docker::{Server, gone, says};
use crate::common::{IMAGE, LIMIT, Started, eventually, finish, text};

#[test]
fn run_gives_a_programs_output_and_exit_code() {
    let server = Server::start();
    let hello = server.run(&[], &["sh", "-c", "echo hello; echo oh >&2"]).ok();
    assert_eq!((hello.text(), hello.stderr.as_str()), ("hello", "oh\n"));
    server.run(&[], &["sh", "-c", "exit 7"]).exited(7);
    server.run(&["--init"], &["sh", "-c", "kill -9 $$"]).exited(137);
    let missing = server.run(&[], &["no-such-program"]).exited(127);
    assert!(missing.stderr.contains("no-such-program"), "{}", missing.stderr);
    server.run(&[], &["/etc/passwd"]).exited(126);
    let input = finish(
        &mut server.command(&["run", "--rm", "-i", "--network", "none", IMAGE, "cat"]),
        b"in and out",
    );
    assert_eq!(input.ok().stdout, b"in and out");
    let terminal = server.run(&["-t"], &["sh", "-c", "tty; stty size >&2"]).ok();
    assert!(terminal.stdout.starts_with(b"/dev/pts/"), "{:?}", terminal.text());
    assert!(terminal.stdout.ends_with(b"\r\n"));
    assert_eq!((server.files(), server.records()), (vec![], vec![]), "--rm leaves nothing");
}

#[test]
fn a_state_root_may_be_named_from_here() {
    let mut server = Server::start();
    server.kill();
    let command = command_of(&server);
    server.serve(command);
    assert_eq!(server.run(&[], &["echo", "hello"]).ok().text(), "hello");
    let run = ["run", "--rm", IMAGE, "echo", "hello"];
    assert_eq!(finish(command_of(&server).args(run), b"").ok().text(), "hello");
}

/// `exocell` in the folder of the server's state root.
fn command_of(server: &Server) -> std::process::Command {
    let mut command = std::process::Command::new(crate::common::program());
    command.current_dir(server.socket().parent().unwrap()).args(["--root", "."]);
    command.env("EXOCELL_KERNEL", crate::common::given("EXOCELL_TEST_KERNEL"));
    command
}

#[test]
fn containers_start_and_end_side_by_side() {
    let server = Server::start();
    std::thread::scope(|scope| {
        let run = |number: usize| {
            let server = &server;
            scope.spawn(move || server.run(&[], &["echo", &number.to_string()]).ok())
        };
        let runs: Vec<_> = (0..6).map(run).collect();
        for (number, run) in runs.into_iter().enumerate() {
            assert_eq!(run.join().unwrap().text(), number.to_string());
        }
    });
    assert_eq!((server.files(), server.records()), (vec![], vec![]));
}

#[test]
fn output_comes_whole_and_in_order() {
    let server = Server::start();
    let counted = server.run(&[], &["seq", "1", "200000"]).ok();
    let expected: String = (1..=200_000).map(|number| format!("{number}\n")).collect();
    assert!(counted.stdout == expected.as_bytes(), "{} bytes", counted.stdout.len());
    let mut piped = server.command(&["run", "--rm", "-i", "--network", "none", IMAGE, "wc", "-c"]);
    assert_eq!(finish(&mut piped, &vec![b'x'; 3 << 20]).ok().text(), (3 << 20).to_string());
}

#[test]
fn a_container_is_made_with_what_its_client_asks() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("given"), "by the host").unwrap();
    let script = "pwd; id -u; echo $A $B; hostname; cat /ro/given; touch /ro/x || echo refused; \
                  echo kept > /data/f; grep MemTotal /proc/meminfo | tr -dc 0-9";
    let read_only = format!("{}:/ro:ro", text(folder.path()));
    let flags = [
        "-w",
        "/tmp",
        "-u",
        "1000",
        "-e",
        "A=a",
        "-e",
        "B=b b",
        "-h",
        "here",
        "-v",
        &read_only,
        "-v",
        "data:/data",
        "-m",
        "128m",
        "--entrypoint",
        "sh",
        "--label",
        "l=v",
    ];
    let volume = server.run(&["-v", "data:/data"], &["chmod", "777", "/data"]);
    volume.ok();
    let made = server.run(&flags, &["-c", script]).ok();
    let lines: Vec<&str> = made.text().lines().collect();
    assert_eq!(lines[..4], ["/tmp", "1000", "a b b", "here"]);
    assert_eq!(lines[4], "by the hostrefused");
    let kib: u64 = lines[5].parse().expect("a number");
    assert!((64 << 10..128 << 10).contains(&kib), "{kib} KiB of memory");
    assert_eq!(server.run(&["-v", "data:/data"], &["cat", "/data/f"]).ok().text(), "kept");
    assert_eq!(server.docker(&["volume", "ls", "-q"]).ok().text(), "data");
    server.docker(&["volume", "rm", "data"]).ok();
    assert_eq!(server.docker(&["volume", "ls", "-q"]).ok().text(), "");
}

#[test]
fn a_running_container_is_looked_into_and_ended() {
    let server = Server::start();
    let id = server.idle("job");
    assert_eq!(id.len(), 64);
    assert_eq!(
        server.inspect("job", "{{.Id}} {{.State.Status}} {{.Name}}"),
        format!("{id} running /job")
    );
    assert_eq!(
        server.docker(&["ps", "--format", "{{.Names}} {{.Image}}"]).ok().text(),
        format!("job {IMAGE}")
    );
    let own = finish(&mut server.exocell(&["ps", "--json"]), b"").ok();
    assert_eq!((&own.json()["name"], &own.json()["image"]), (&"job".into(), &IMAGE.into()));
    let cell = server.cell("job");

    let exec = ["exec", "-e", "X=1", "-w", "/usr", "-u", "daemon", "job"];
    let ran = server.docker(
        &[&exec[..], &["sh", "-c", "echo $X $(pwd) $(id -un); echo oh >&2; exit 3"]].concat(),
    );
    let ran = ran.exited(3);
    assert_eq!((ran.text(), ran.stderr.as_str()), ("1 /usr daemon", "oh\n"));
    server.docker(&["exec", "job", "no-such-program"]).exited(127);
    let input = finish(&mut server.command(&["exec", "-i", "job", "wc", "-c"]), b"12345");
    assert_eq!(input.ok().text(), "5");
    server.docker(&["exec", "-d", "job", "touch", "/tmp/detached"]).ok();
    says(&server, &["exec", "job", "ls", "/tmp/detached"], "/tmp/detached");

    let top = server.docker(&["top", "job"]).ok();
    assert!(top.text().contains("sleep infinity"), "{}", top.text());
    assert_eq!(top.text().lines().count(), 2, "the list is not in it: {}", top.text());
    let stats =
        server.docker(&["stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}"]).ok();
    assert!(
        stats.text().starts_with("job ") && stats.text().ends_with("256MiB"),
        "{}",
        stats.text()
    );

    server.docker(&["rename", "job", "work"]).ok();
    assert_eq!(finish(&mut server.exocell(&["ps", "--json"]), b"").ok().json()["name"], "work");
    let refused = server.docker(&["rm", "work"]).exited(1);
    assert!(refused.stderr.contains("running"), "{}", refused.stderr);
    // A loaded machine may take longer than the ten seconds of the default.
    server.docker(&["stop", "-t", "60", "work"]).ok();
    assert_eq!(server.inspect("work", "{{.State.Status}} {{.State.ExitCode}}"), "exited 143");
    assert_eq!(server.docker(&["wait", "work"]).ok().text(), "143");
    gone(&cell);
    server.docker(&["rm", "work"]).ok();
    assert_eq!((server.files(), server.records()), (vec![], vec![]));
    server.docker(&["inspect", "work"]).exited(1);
}

#[test]
fn signals_and_kills_reach_the_program() {
    let server = Server::start();
    let script = "trap 'echo got it; exit 4' USR1; echo ready; while :; do sleep 0.1; done";
    let run = ["run", "-d", "--network", "none", "--name", "s", IMAGE, "sh", "-c", script];
    server.docker(&run).ok();
    says(&server, &["logs", "s"], "ready");
    server.docker(&["kill", "-s", "USR1", "s"]).ok();
    assert_eq!(server.docker(&["wait", "s"]).ok().text(), "4");
    assert_eq!(server.docker(&["logs", "s"]).ok().text(), "ready\ngot it");
    server.idle("k");
    server.docker(&["kill", "k"]).ok();
    assert_eq!(server.inspect("k", "{{.State.ExitCode}}"), "137");
    server.docker(&["kill", "k"]).exited(1);
    server.idle("f");
    server.docker(&["rm", "-f", "f"]).ok();
    assert_eq!(server.docker(&["ps", "-aq", "--filter", "name=f"]).ok().text(), "");
}

#[test]
fn a_paused_container_stands_still() {
    let server = Server::start();
    let script = "i=0; while :; do i=$((i + 1)); echo $i; sleep 0.01; done";
    let run = ["run", "-d", "--network", "none", "--name", "p", IMAGE, "sh", "-c", script];
    server.docker(&run).ok();
    let last = || server.docker(&["logs", "--tail", "1", "p"]).ok().text().to_owned();
    eventually("it counts", || !last().is_empty());
    assert!(server.docker(&["unpause", "p"]).exited(1).stderr.contains("is not paused"));
    server.docker(&["pause", "p"]).ok();
    assert_eq!(server.inspect("p", "{{.State.Status}} {{.State.Paused}}"), "paused true");
    let row = server.docker(&["ps", "--format", "{{.Status}}"]).ok();
    assert!(row.text().ends_with("(Paused)"), "{}", row.text());
    let cell = server.cell("p");
    // What it wrote before may still be on its way into the log.
    let counted = || {
        let now = last();
        std::thread::sleep(Duration::from_millis(300));
        now == last()
    };
    eventually("it stands still", counted);
    let counted = last();
    let own = finish(&mut server.exocell(&["ps", "--json"]), b"").ok().json();
    assert_eq!((&own["state"], &own["paused"]), (&"running".into(), &true.into()));
    for refused in [&["exec", "p", "true"][..], &["pause", "p"], &["cp", "p:/etc/hostname", "-"]] {
        let refused = server.docker(refused).exited(1);
        assert!(refused.stderr.contains("paused"), "{}", refused.stderr);
    }
    server.docker(&["unpause", "p"]).ok();
    eventually("it goes on", || last() != counted);
    server.docker(&["exec", "p", "true"]).ok();
    server.docker(&["pause", "p"]).ok();
    server.docker(&["stop", "-t", "30", "p"]).ok();
    // The signal let it go on: sh as its first program ends by it.
    assert_eq!(server.inspect("p", "{{.State.Status}} {{.State.ExitCode}}"), "exited 143");
    gone(&cell);
    server.docker(&["rm", "p"]).ok();
    server.idle("q");
    server.docker(&["pause", "q"]).ok();
    server.docker(&["rm", "-f", "q"]).ok();
    assert_eq!(server.docker(&["ps", "-aq"]).ok().text(), "");
}

#[test]
fn logs_are_followed_cut_and_stamped() {
    let server = Server::start();
    let script = "for i in 1 2 3; do echo out $i; echo err $i >&2; done; read line; echo last";
    let create = ["create", "-i", "--network", "none", "--name", "l", IMAGE, "sh", "-c", script];
    server.docker(&create).ok();
    let mut attached = Started::new(&mut server.command(&["start", "-ai", "l"]));
    says(&server, &["logs", "l"], "out 1\nout 2\nout 3");
    let followed = Started::new(&mut server.command(&["logs", "-f", "l"]));
    attached.write(b"\n");
    attached.close_stdin();
    let attached = attached.finish(LIMIT).expect("the program ends").ok();
    assert_eq!(attached.text(), "out 1\nout 2\nout 3\nlast");
    assert_eq!(attached.stderr, "err 1\nerr 2\nerr 3\n");
    let followed = followed.finish(LIMIT).expect("logs end with the program").ok();
    assert_eq!(
        (followed.text(), followed.stderr.lines().count()),
        ("out 1\nout 2\nout 3\nlast", 3)
    );
    let stamped = server.docker(&["logs", "-t", "--tail", "1", "l"]).ok();
    let (time, line) = stamped.text().split_once(' ').expect("a time");
    assert!(time.starts_with("20") && time.ends_with('Z') && line == "last", "{}", stamped.text());
    assert_eq!(server.docker(&["logs", "--since", "2099-01-01", "l"]).ok().text(), "");
}

#[test]
fn files_go_in_and_out() {
    let server = Server::start();
    server.idle("c");
    let host = tempfile::tempdir().unwrap();
    let (folder, back) = (host.path().join("folder"), host.path().join("back"));
    fs::create_dir_all(folder.join("deep")).unwrap();
    fs::write(folder.join("deep/file"), "content").unwrap();
    std::os::unix::fs::symlink("deep/file", folder.join("link")).unwrap();
    server.docker(&["cp", text(&folder), "c:/opt"]).ok();
    server.docker(&["cp", &format!("{}/.", text(&folder)), "c:/mnt"]).ok();
    server.docker(&["cp", text(&folder.join("deep/file")), "c:/opt/other"]).ok();
    let listed =
        server.docker(&["exec", "c", "sh", "-c", "cat /opt/folder/link /mnt/deep/file /opt/other"]);
    assert_eq!(listed.ok().text(), "contentcontentcontent");
    server.docker(&["cp", "c:/opt/folder", text(&back)]).ok();
    assert_eq!(fs::read_to_string(back.join("link")).unwrap(), "content");
    let into = host.path().join("into");
    fs::create_dir(&into).unwrap();
    server.docker(&["cp", "c:/opt/folder/.", text(&into)]).ok();
    assert_eq!(fs::read_to_string(into.join("deep/file")).unwrap(), "content");
    let missing = server.docker(&["cp", "c:/no/such", text(host.path())]).exited(1);
    assert!(missing.stderr.contains("no/such"), "{}", missing.stderr);
    server.docker(&["cp", text(&folder), "c:/no/such/"]).exited(1);
    let stream = server.docker(&["cp", "c:/opt/other", "-"]).ok();
    assert!(stream.stdout.starts_with(b"other"));
}

#[test]
fn a_container_becomes_an_image() {
    let server = Server::start();
    let (image, made) = (server.small(), ["made", "made"].map(|word| server.image(word)));
    let create = ["run", "-d", "--network", "none", "--name", "c", "-e", "OWN=1", "-w", "/data"];
    let program = ["-u", "7", "--label", "of=me", "--entrypoint", "sleep", &image, "infinity"];
    server.docker(&[&create[..], &program].concat()).ok();
    server.docker(&["exec", "-u", "0", "c", "sh", "-c", "echo made > /data/file"]).ok();
    let id = server.docker(&["commit", "-m", "words", "c", &made[0]]).ok().text().to_owned();
    assert!(id.starts_with("sha256:"), "{id}");
    let seen = |image| {
        let run = ["run", "--rm", "--network", "none", "--entrypoint", "cat"];
        server.docker(&[&run[..], &[image, "file"]].concat()).ok().text().to_owned()
    };
    assert_eq!(seen(&made[0]), "made");
    let format = "{{.Config.Entrypoint}} {{.Config.Cmd}} {{.Config.User}} {{.Config.WorkingDir}} \
                  {{.Config.Labels.of}} {{.Config.Env}}";
    let config = server.docker(&["image", "inspect", "-f", format, &made[0]]).ok();
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let wanted = format!("[sleep] [infinity] 7 /data me [{path} OWN=1]");
    assert_eq!(config.text(), wanted, "it is started as the container was");
    server.docker(&["stop", "-t", "0", "c"]).ok();
    server.docker(&["commit", "c", &made[1]]).ok();
    assert_eq!(seen(&made[1]), "made", "an ended one can be committed too");
    let names = |filter: &str| {
        let listed = ["images", "--filter", filter, "--format", "{{.Repository}}:{{.Tag}}"];
        server.docker(&listed).ok().text().to_owned()
    };
    let before = names(&format!("before={}", made[1]));
    assert!(!before.contains(&made[1]) && names("until=1h").lines().all(|name| name != made[1]));
    // What no container has goes, with its name, as far as the filters say.
    let mine = format!("label=mine={}", made[1]);
    server.docker(&["commit", "-c", &format!("LABEL mine={}", made[1]), "c", &made[1]]).ok();
    server.docker(&["image", "prune", "-f", "--filter", &mine]).ok();
    assert_eq!(names(&mine), made[1], "it has a name");
    server.docker(&["run", "-d", "--name", "user", &made[1]]).ok();
    let prune = ["image", "prune", "-af", "--filter", &mine];
    server.docker(&prune).ok();
    assert_eq!(names(&mine), made[1], "a container has it");
    server.docker(&["rm", "-f", "user"]).ok();
    server.docker(&prune).ok();
    assert_eq!(names(&mine), "");
}

#[test]
fn events_tell_a_containers_life() {
    let server = Server::start();
    server
        .docker(&["run", "--network", "none", "--name", "e", IMAGE, "sh", "-c", "exit 5"])
        .exited(5);
    server.docker(&["rm", "e"]).ok();
    // Told from memory: one that listens may come at any time.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let until = (now.as_secs() + 1).to_string();
    let ask = ["events", "--since", "1", "--until", &until, "--filter", "container=e", "--format"];
    let heard =
        server.docker(&[&ask[..], &["{{.Action}} {{.Actor.Attributes.exitCode}}"]].concat());
    let heard = heard.ok();
    let actions: Vec<&str> =
        heard.text().lines().map(|line| line.split(' ').next().unwrap()).collect();
    let expected = ["create", "attach", "start", "die", "destroy"];
    assert_eq!(actions, expected, "{}", heard.text());
    assert!(heard.text().contains("die 5"), "{}", heard.text());
}

#[test]
fn lists_are_filtered_and_names_are_unique() {
    let server = Server::start();
    for (name, label) in [("one", "k=a"), ("two", "k=b")] {
        server
            .docker(&["create", "--name", name, "-l", label, "--network", "none", IMAGE, "true"])
            .ok();
    }
    let named = |filter: &str| {
        let args = ["ps", "-a", "--format", "{{.Names}} {{.State}}", "--filter", filter];
        server.docker(&args).ok().text().to_owned()
    };
    assert_eq!(named("label=k=a"), "one created");
    assert_eq!(named("status=created"), "two created\none created");
    assert_eq!(named("status=running"), "");
    assert_eq!(server.docker(&["ps", "-q"]).ok().text(), "");
    let taken = server.docker(&["create", "--name", "one", IMAGE, "true"]).exited(1);
    assert!(taken.stderr.contains("already in use"), "{}", taken.stderr);
    server.docker(&["start", "-a", "one"]).ok();
    assert_eq!(named("exited=0"), "one exited");
    assert_eq!(server.docker(&["container", "prune", "-f"]).ok().text().lines().count(), 5);
    assert_eq!((server.files(), server.records()), (vec![], vec![]));
}

#[test]
fn what_cells_do_not_have_is_refused_by_name() {
    let server = Server::start();
    let run = |flags: &[&str]| server.run(flags, &["true"]).exited(125).stderr;
    assert!(run(&["-p", "80:80"]).contains("conflicting options"));
    assert!(run(&["-p", "80:80/sctp"]).contains("publishing 80/sctp is not supported"));
    assert!(run(&["--pid", "host"]).contains("pid mode host"));
    assert!(run(&["--device", "/dev/mem"]).contains("no device of the host"));
    assert!(run(&["-v", "/dev/null:/x"]).contains("no folder, regular file or socket"));
    let warned = server.docker(&["run", "--rm", IMAGE, "true"]).ok();
    assert!(warned.stderr.contains("--allow-net"), "{}", warned.stderr);
    server.idle("r");
    for (args, word) in [
        (&["commit", "--change", "RUN x", "r", "x"][..], "a change is one of"),
        (&["save", "no/such:image"], "no/such:image"),
        (&["update", "-m", "1g", "r"], "more than the 268435456"),
        (&["update", "--blkio-weight", "100", "r"], "BlkioWeight"),
        (&["swarm", "init"], "swarm"),
    ] {
        let refused = server.docker(args).exited(1);
        assert!(refused.stderr.contains(word), "{args:?}: {}", refused.stderr);
    }
}

#[test]
fn a_servers_kill_leaves_cells_that_the_next_one_knows() {
    let mut server = Server::start();
    server.docker(&["create", "--name", "made", "--network", "none", IMAGE, "echo", "later"]).ok();
    server.idle("stays");
    let run = ["run", "-d", "--rm", "--network", "none", "--name", "short", IMAGE, "sh", "-c"];
    server
        .docker(&[&run[..], &["while ! [ -e /tmp/end ]; do sleep 0.1; done; exit 6"]].concat())
        .ok();
    let (stays, short) = (server.cell("stays"), server.cell("short"));
    server.kill();
    server.resume();
    let names = ["ps", "-a", "--format", "{{.Names}} {{.State}}"];
    assert_eq!(server.docker(&names).ok().text(), "short running\nstays running\nmade created");
    let waiting = Started::new(&mut server.command(&["wait", "short"]));
    // The end that it brings about may come before its own.
    server.docker(&["exec", "short", "touch", "/tmp/end"]);
    let waited = waiting.finish(LIMIT).expect("it ends");
    assert!(["6", "0"].contains(&waited.text()), "{}", waited.text());
    gone(&short);
    eventually("--rm holds", || server.docker(&names).text() == "stays running\nmade created");
    assert_eq!(server.docker(&["start", "-a", "made"]).ok().text(), "later");
    server.kill();
    finish(&mut server.exocell(&["rm", "-f", "stays", "made"]), b"").ok();
    gone(&stays);
    server.resume();
    assert_eq!(server.docker(&names).ok().text(), "");
    assert_eq!((server.files(), server.records()), (vec![], vec![]));
}

/// What systemd does for a socket unit: it binds the socket, and hands it over as descriptor 3.
const HANDS_OVER: &str = "
import os, socket, sys
words = sys.argv[1:]
at = words.index('--docker') + 1
server = socket.socket(socket.AF_UNIX)
server.bind(words[at])
server.listen()
words[at] = 'fd://'
os.dup2(server.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')
os.execv(words[0], words)
";

#[test]
fn a_server_takes_the_socket_that_it_is_given() {
    let mut server = Server::start();
    server.kill();
    fs::remove_file(server.socket()).expect("the killed server's socket");
    let plain = server.exocell(&[]);
    let mut command = std::process::Command::new("python3");
    command.args(["-c", HANDS_OVER]).arg(plain.get_program()).args(plain.get_args());
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    server.serve(command);
    assert_eq!(server.docker(&["ps", "-q"]).ok().text(), "");
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(server.pid()),
        nix::sys::signal::Signal::SIGTERM,
    )
    .expect("it lives");
    eventually("it ends", || server.docker(&["ps"]).code != 0);
    assert!(server.socket().exists(), "the socket is whoever's gave it");
    finish(&mut server.exocell(&["serve", "--docker", "fd://"]), b"")
        .exited(125)
        .complains_of(&["LISTEN_FDS", "path"]);
}
