//! Containers in the guest of another cell: its network, and nothing else of it.

use crate::common::cell::Cell;
use crate::common::host::{self, kill};
use crate::common::{Finished, IMAGE, eventually, run, unique};

/// What puts a cell into the guest of another.
fn with(other: &Cell) -> [String; 2] {
    ["--network".to_owned(), format!("container:{}", other.name)]
}

/// Runs a script in the guest of `other` to its end.
#[track_caller]
fn beside(other: &Cell, flags: &[&str], script: &str) -> Finished {
    let with = with(other);
    let fixed = ["run", "--rm", &with[0], &with[1]];
    run([&fixed[..], flags, &[IMAGE, "sh", "-c", script]].concat())
}

/// One that waits in the guest of `other`.
#[track_caller]
fn waits(word: &str, other: &Cell, flags: &[&str]) -> Cell {
    let with = with(other);
    Cell::idle(word, &[&[with[0].as_str(), with[1].as_str()], flags].concat())
}

/// Asserts that `script` comes to succeed in `cell`.
#[track_caller]
fn comes_to_succeed(cell: &Cell, script: &str) {
    eventually(script, || cell.shell(script).code == 0);
}

/// Whether port `port` of the loopback answers.
fn asks(port: u16) -> String {
    format!("python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 1)'")
}

#[test]
fn the_network_is_shared_and_the_rest_is_its_own() {
    let web = Cell::start("web", &["--hostname", "web"], &["python3", "-m", "http.server", "80"]);
    web.shell("echo web > /mine; touch /dev/shm/mine /tmp/mine").ok();
    comes_to_succeed(&web, &asks(80));
    let side = waits("side", &web, &["--hostname", "side"]);
    // Both ways, and at once where the other listens.
    side.shell(&asks(80)).ok();
    let serves = ["python3", "-m", "http.server", "81"];
    let _serving = crate::common::Started::new(&mut side.exec(&[], &serves));
    comes_to_succeed(&web, &asks(81));
    // Files, processes, names and the rest of it.
    side.shell("test ! -e /mine -a ! -e /dev/shm/mine -a ! -e /tmp/mine").ok();
    side.shell("echo side > /mine").ok();
    assert_eq!(web.shell("cat /mine").ok().text(), "web");
    assert_eq!(side.shell("hostname; cat /etc/hostname").ok().text(), "side\nside");
    assert_eq!(web.shell("hostname").ok().text(), "web");
    assert_eq!(side.shell("cat /proc/1/comm").ok().text(), "sleep");
    let processes = side.shell("ls /proc | grep -c '^[0-9]'").ok();
    assert!(processes.text().parse::<u32>().is_ok_and(|count| count < 10), "{}", processes.text());
    for kind in ["mnt", "pid", "uts", "ipc", "cgroup"] {
        let link = format!("readlink /proc/self/ns/{kind}");
        assert_ne!(web.shell(&link).ok().text(), side.shell(&link).ok().text(), "{kind}");
    }
    let link = "readlink /proc/self/ns/net";
    assert_eq!(web.shell(link).ok().text(), side.shell(link).ok().text());
    // One that is told to join the second joins the first.
    let third = beside(&side, &[], &asks(80));
    third.ok();
}

#[test]
fn its_image_may_be_over_others() {
    let web = Cell::idle("web", &[]);
    web.shell("echo first > /first && rm /etc/hostname").ok();
    let (first, second) = (Image(unique("first")), Image(unique("second")));
    run(["commit", &web.name, &first.0]).ok();
    let with = with(&web);
    let flags = ["run", "-d", "--network", with[1].as_str(), "--name"];
    let side = Cell { name: unique("side") };
    run([&flags[..], &[&side.name, &first.0, "sleep", "infinity"]].concat()).ok();
    side.shell("cat /first && echo second > /second && rm /first").ok();
    // What a container in another's guest has changed is over its own image.
    run(["commit", &side.name, &second.0]).ok();
    let script = "test ! -e /first && cat /second";
    let seen = run(["run", "--rm", &with[0], &with[1], &second.0, "sh", "-c", script]).ok();
    assert_eq!(seen.text(), "second");
    let alone = run(["run", "--rm", &second.0, "sh", "-c", script]).ok();
    assert_eq!(alone.text(), "second");
    let read_only = ["run", "--rm", "--read-only", &second.0, "sh", "-c", script];
    assert_eq!(run(read_only).ok().text(), "second");
    run(["image", "rm", &second.0]).ok();
    run(["image", "rm", &first.0]).exited(125).complains_of(&["in use"]);
}

/// An image that is removed with its owner.
struct Image(String);

impl Drop for Image {
    fn drop(&mut self) {
        run(["image", "rm", &self.0]);
    }
}

#[test]
fn it_is_a_cell_as_any() {
    let web = Cell::idle("web", &[]);
    assert_eq!(beside(&web, &[], "echo out; echo err >&2; exit 7").exited(7).text(), "out");
    assert_eq!(beside(&web, &["-e", "A=b", "-w", "/srv"], "echo $A $PWD").ok().text(), "b /srv");
    let side = waits("side", &web, &[]);
    let shown = side.inspect();
    let id = web.inspect()["id"].as_str().expect("an id").to_owned();
    assert_eq!(shown["spec"]["within"]["cell"], id.as_str(), "{shown}");
    let listed = run(["ps"]).ok();
    assert!(listed.text().contains(&side.name) && listed.text().contains(&web.name));
    // Pids are each container's own, and so are signals to them.
    side.shell("test $(readlink /proc/1/exe) != ''").ok();
    let folder = tempfile::tempdir().expect("a folder");
    let (file, back) = (folder.path().join("file"), folder.path().join("back"));
    std::fs::write(&file, "content").expect("a file");
    let there = format!("{}:/copied", side.name);
    run(["cp", crate::common::text(&file), &there]).ok();
    assert_eq!(side.shell("cat /copied").ok().text(), "content");
    web.shell("test ! -e /copied").ok();
    run(["cp", &there, crate::common::text(&back)]).ok();
    assert_eq!(std::fs::read_to_string(back).expect("a copy"), "content");
    let terminal =
        crate::common::finish(&mut side.exec(&["-t"], &["sh", "-c", "test -t 0 && tty"]), b"");
    assert!(terminal.ok().text().starts_with("/dev/pts/"));
    // Its end is its own.
    run(["stop", "-t", "0", &side.name]).ok();
    eventually("it has ended", || side.state() == "exited");
    web.shell("true").ok();
    // It starts again with its files, as long as it is not removed.
    run(["start", &side.name]).ok();
    assert_eq!(side.shell("cat /copied").ok().text(), "content");
    run(["rm", "-f", &side.name]).ok();
    web.shell("true").ok();
}

#[test]
fn limits_are_its_own_within_the_cells() {
    let web = Cell::idle("web", &["--memory", "256m", "--pids-limit", "60"]);
    let flags = ["--memory", "64m", "--pids-limit", "20", "--cpus", "0.5"];
    let side = waits("side", &web, &flags);
    let said = |cell: &Cell, file: &str| {
        cell.shell(&format!("cat /sys/fs/cgroup/{file}")).ok().text().to_owned()
    };
    assert_eq!(said(&side, "memory.max"), (64 << 20).to_string());
    assert_eq!(said(&side, "pids.max"), "20");
    assert_eq!(said(&side, "cpu.max"), "50000 100000");
    assert_eq!(said(&web, "pids.max"), "60");
    // What is one container's is not the other's to have, but both have no more than the cell.
    let forks = "import os, time
count = 0
try:
    while count < 90:
        os.fork() or time.sleep(100)
        count += 1
except OSError: print(count)";
    let with = with(&web);
    let flags = ["run", "--rm", &with[0], &with[1], IMAGE, "python3", "-c", forks];
    let count = run(flags).ok().text().parse::<u32>().expect("it may not have all of them");
    assert!((20..60).contains(&count), "{count}");
    web.shell("true").ok();
    // Memory that one takes is its own end, not the other's.
    let eats = "python3 -c 'b = bytearray(120 << 20); print(len(b))'";
    let eaten = side.shell(eats);
    assert_eq!(eaten.code, 137, "{}", eaten.stderr);
    web.shell("true").ok();
}

#[test]
fn it_ends_with_the_cell_and_says_so() {
    let mut web = Some(Cell::idle("web", &[]));
    let name = web.as_ref().expect("a cell").name.clone();
    let side = waits("side", web.as_ref().expect("a cell"), &[]);
    run(["stop", "-t", "0", &name]).ok();
    eventually("it has ended", || side.state() == "exited");
    let status = side.inspect();
    assert_eq!(status["exit_code"], 137, "{status}");
    let reason = status["reason"].as_str().expect("a reason").to_owned();
    assert!(reason.contains(&name) && reason.contains("has ended"), "{reason}");
    let refused = beside(web.as_ref().expect("a cell"), &[], "true").exited(125);
    refused.complains_of(&["does not run"]);
    drop(web.take());
}

#[test]
fn whoever_is_killed_leaves_nothing_and_the_cell_goes_on() {
    let web = Cell::idle("web", &[]);
    for _ in 0..3 {
        let side = waits("side", &web, &["--rm"]);
        let supervisor = side.supervisor();
        let namespace = host::namespace(supervisor).expect("it lives");
        side.shell("mkdir -p /a/b && echo > /a/b/c").ok();
        kill(supervisor);
        eventually("its processes end", || host::processes(&namespace).is_empty());
        // The guest ends what was in it.
        let count = "ls /sys/fs/cgroup >/dev/null; true";
        web.shell(count).ok();
    }
    // There is room for as many more as there was.
    let sides: Vec<Cell> = (0..3).map(|_| waits("side", &web, &[])).collect();
    let supervisor = web.supervisor();
    let namespace = host::namespace(supervisor).expect("it lives");
    kill(supervisor);
    eventually("the guest ends", || host::processes(&namespace).is_empty());
    for side in &sides {
        eventually("it has ended", || side.state() == "exited");
    }
}

#[test]
fn what_another_has_from_its_boot_on_is_refused_in_a_sentence() {
    let web = Cell::idle("web", &["--memory", "128m"]);
    let refused = |flags: &[&str], words: &[&str]| {
        beside(&web, flags, "true").exited(125).complains_of(words);
    };
    refused(&["-p", "8080:80"], &["--publish"]);
    refused(&["--allow-net", "a.test:1"], &["the rules"]);
    refused(&["-v", "/tmp:/t"], &["--volume"]);
    refused(&["--memory", "1g"], &["--memory", "more than the cell", &web.name]);
    refused(&["--disk", "1g"], &["--disk"]);
    refused(&["--network", "none"], &["conflicting options"]);
    refused(&["--add-host", "a:1.1.1.1"], &["conflicting options", "host-to-IP"]);
    refused(&["--sysctl", "net.core.somaxconn=1"], &["net.core.somaxconn"]);
    refused(&["--strength", "isolate"], &["isolate"]);
    let none = run(["run", "--network", "container:nobody", IMAGE, "true"]).exited(125);
    none.complains_of(&["no such cell: nobody"]);
    let frozen = Cell::idle("frozen", &["--read-only"]);
    beside(&frozen, &[], "true").exited(125).complains_of(&["--read-only"]);
    // Read-only itself it can be.
    let said = beside(&web, &["--read-only"], "touch /x 2>/dev/null || echo > /tmp/x && echo no");
    assert_eq!(said.ok().text(), "no");
    let own = unique("own");
    let with = format!("container:{own}");
    run(["run", "--name", &own, "--network", &with, IMAGE, "true"]).exited(125);
}

#[test]
fn nothing_of_the_cells_own_root_is_in_reach() {
    let web = Cell::idle("web", &[]);
    web.shell("echo secret > /mine").ok();
    // The classic way out of a changed root.
    let escape = "import os
os.makedirs('/d', exist_ok=True)
fd = os.open('/', os.O_RDONLY)
os.chroot('/d')
os.fchdir(fd)
for _ in range(64): os.chdir('..')
os.chroot('.')
print(sorted(os.listdir('/'))[:50], os.path.exists('/mine'), os.path.exists('/private'))";
    let said = {
        let with = with(&web);
        run(["run", "--rm", "--privileged", &with[0], &with[1], IMAGE, "python3", "-c", escape])
    };
    let said = said.ok();
    assert!(said.text().ends_with("False False"), "{}", said.text());
    let mounts = beside(&web, &["--privileged"], "cat /proc/self/mountinfo").ok();
    assert!(!mounts.text().contains("ext4"), "{}", mounts.text());
    assert_eq!(mounts.text().lines().filter(|line| line.contains(" / / ")).count(), 1);
}

#[test]
fn a_node_that_a_container_makes_opens_no_disk_of_the_guest() {
    let web = Cell::idle("web", &[]);
    web.shell("echo secret-of-web > /mine && sync").ok();
    let side = waits("side", &web, &[]);
    let other = waits("other", &web, &[]);
    other.shell("true").ok();
    // Nodes can be made, as under docker, and none of them opens: disks, images of others by loop
    // devices, the kernel's log and console, its loop devices, memory.
    let opens = "import os, stat
def look(kind, major, minor, modes=(os.O_RDONLY, os.O_RDWR)):
    path = f'/node-{kind}-{major}-{minor}'
    os.mknod(path, kind | 0o600, os.makedev(major, minor))
    for mode in modes:
        try:
            os.close(os.open(path, mode | os.O_NONBLOCK))
            print('opened', path, mode)
        except PermissionError: pass
        except OSError as error: print(path, error)
for disk in os.listdir('/sys/block'):
    with open(f'/sys/block/{disk}/dev') as file: major, minor = map(int, file.read().split(':'))
    look(stat.S_IFBLK, major, minor)
for major, minor in (1, 1), (1, 2), (1, 11), (5, 1), (10, 237), (10, 235), (10, 256), (229, 0):
    look(stat.S_IFCHR, major, minor)
with open('/dev/null', 'w'), open('/dev/urandom', 'rb'), open('/dev/ptmx', 'r+b', 0): print('done')
os.mknod('/zero', stat.S_IFCHR | 0o600, os.makedev(1, 5))
print(open('/zero', 'rb').read(1))";
    for cell in [&side, &web] {
        let said = crate::common::finish(&mut cell.exec(&[], &["python3", "-c", opens]), b"").ok();
        assert_eq!(said.text(), "done\nb'\\x00'");
    }
    // Nor do all capabilities of an `exec`.
    let refused = |said: &Finished| {
        assert!(said.stderr.contains("Operation not permitted"), "{}", said.stderr);
    };
    let disk = "mknod /disk b 7 512 && head -c 1 /disk";
    refused(&run(["exec", "--privileged", &side.name, "sh", "-c", disk]));
    assert_eq!(web.shell("cat /mine").ok().text(), "secret-of-web");
    // What is asked for by name is there, and a privileged one has all.
    let kernel = "mknod /log c 1 11 && echo of-a-test > /log && echo 1";
    assert_eq!(beside(&web, &["--device", "/dev/kmsg"], kernel).ok().text(), "1");
    assert_eq!(beside(&web, &["--privileged"], kernel).ok().text(), "1");
    refused(&beside(&web, &[], kernel));
}

#[test]
fn what_a_container_has_made_of_files_of_etc_holds_nobody_up() {
    let web = Cell::idle("web", &[]);
    let side = waits("side", &web, &["--hostname", "side"]);
    let script = "cd /etc && rm -f hosts hostname passwd resolv.conf && mkfifo hosts passwd && \
                  mknod hostname b 7 512 && ln -s /etc/group resolv.conf && cp group /group";
    for cell in [&side, &web] {
        cell.shell(script).ok();
        // A pipe is no list of users.
        cell.shell("id -u").ok();
        run(["exec", "-u", "daemon", &cell.name, "true"]).complains_of(&["no user daemon"]);
        run(["stop", "-t", "0", &cell.name]).ok();
        if cell.name == side.name {
            run(["start", &cell.name]).ok();
            let files = "test -p /etc/passwd && cmp /etc/group /group && cat /etc/hostname && \
                         grep -c side /etc/hosts";
            assert_eq!(cell.shell(files).ok().text(), "side\n1");
        }
    }
    run(["start", &web.name]).ok();
    web.shell("test -f /etc/hosts && grep -q localhost /etc/hosts && test -p /etc/passwd").ok();
    // Places are free again, and no device is in the way.
    beside(&web, &[], "true").ok();
}
