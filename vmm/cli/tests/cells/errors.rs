//! Bad input and hosts that lack something: the right exit code, one line that
//! names the thing and the remedy, and nothing left behind.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::common::guest::{PrivateRoot, TINY, tiny_tree};
use crate::common::{Finished, IMAGE, finish, program, run, shell, text};

#[test]
fn a_missing_image_is_named() {
    let root = PrivateRoot::new();
    let ended = root.run(["run", "--rm", "no/such:image", "true"]).exited(125);
    ended.complains_of(&["no/such:image", "image import"]);
    root.holds_no_cells();
}

#[test]
fn a_missing_kernel_is_named() {
    let root = PrivateRoot::with_image();
    fs::remove_file(root.path().join("kernels")).unwrap();
    root.run_cell(&[], &["true"])
        .exited(125)
        .complains_of(&["guest kernel", "exocell kernel build"]);
    root.run(["kernel", "status"]).exited(1);
    root.holds_no_cells();
}

#[test]
fn the_smallest_image_runs() {
    let root = PrivateRoot::with_image();
    assert_eq!(root.run_cell(&[], &["sh", "-c", "echo hi; exit 3"]).exited(3).text(), "hi");
    root.holds_no_cells();
}

/// An OCI layout with one layer; `digest` is what the manifest says of it.
fn layout(at: &Path, architecture: &str, layer: &[u8], digest: &str) {
    let blobs = at.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(at.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string()).unwrap();
    let put = |bytes: &[u8]| {
        let digest = hex(bytes);
        fs::write(blobs.join(&digest), bytes).unwrap();
        json!({ "digest": format!("sha256:{digest}"), "size": bytes.len() })
    };
    fs::write(blobs.join(digest), layer).unwrap();
    let typed = |mut descriptor: serde_json::Value, name: &str| {
        descriptor["mediaType"] = format!("application/vnd.oci.image.{name}").into();
        descriptor
    };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", hex(layer))] },
    });
    let config = typed(put(config.to_string().as_bytes()), "config.v1+json");
    let layer = json!({ "digest": format!("sha256:{digest}"), "size": layer.len() });
    let manifest = json!({
        "schemaVersion": 2, "config": config, "layers": [typed(layer, "layer.v1.tar")],
    });
    let manifest = typed(put(manifest.to_string().as_bytes()), "manifest.v1+json");
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(at.join("index.json"), index.to_string()).unwrap();
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn layer() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    for set in
        [tar::Header::set_uid, tar::Header::set_gid, tar::Header::set_mtime, tar::Header::set_size]
    {
        set(&mut header, 0);
    }
    header.set_mode(0o644);
    builder.append_data(&mut header, "file", &b""[..]).unwrap();
    builder.into_inner().unwrap()
}

#[test]
fn a_corrupt_layer_is_refused() {
    let root = PrivateRoot::new();
    let at = root.dir.path().join("layout");
    let good = layer();
    let mut bad = good.clone();
    bad[0] ^= 1;
    layout(&at, "amd64", &bad, &hex(&good));
    let ended = root.run(["image", "import", text(&at), "--tag", "bad:1"]).exited(125);
    ended.complains_of(&["corrupt", &hex(&good), "again"]);
    assert_eq!(root.run(["image", "ls", "--json"]).ok().text(), "");
    layout(&at, "amd64", &good, &hex(&good));
    root.run(["image", "import", text(&at), "--tag", "good:1"]).ok();
}

#[test]
fn another_architecture_is_refused() {
    let root = PrivateRoot::new();
    let at = root.dir.path().join("layout");
    layout(&at, "arm64", &layer(), &hex(&layer()));
    let ended = root.run(["image", "import", text(&at), "--tag", "arm:1"]).exited(125);
    ended.complains_of(&["arm64", "linux/amd64"]);
    assert_eq!(root.run(["image", "ls", "--json"]).ok().text(), "");
}

#[test]
fn what_is_no_image_is_refused() {
    let root = PrivateRoot::new();
    let file = root.dir.path().join("file");
    fs::write(&file, "not an image").unwrap();
    root.run(["image", "import", text(&file)]).exited(125).complains_of(&[text(&file)]);
    let missing = root.dir.path().join("missing");
    root.run(["image", "import", text(&missing)]).exited(125).complains_of(&[text(&missing)]);
}

/// Runs `/bin/true` under the capability table `table`.
fn under_table(table: &str, flags: &[&str]) -> Finished {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    fs::write(file.path(), table).unwrap();
    let fixed = ["run", "--rm", "--caps", text(file.path())];
    run([&fixed[..], flags, &[IMAGE, "true"]].concat())
}

const TABLE: &str = "version = 1\n[memory]\nlimit = '128M'\n[cpu]\ncount = 1\n\
                     [processes]\nmax = 64\n[stdio]\n[clock]\n[random]\n";

#[test]
fn a_table_is_enough_for_a_cell() {
    under_table(TABLE, &[]).ok();
    under_table(TABLE, &["--memory", "64m"]).ok();
}

#[test]
fn an_unknown_capability_is_named() {
    let ended = under_table(&format!("{TABLE}[teleport]\n"), &[]).exited(125);
    assert!(
        ended.stderr.contains("teleport") && ended.stderr.contains(".toml"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.starts_with("exocell: "), "{}", ended.stderr);
    let flag = run(["run", "--rm", "--cap", "teleport=1", IMAGE, "true"]).exited(125);
    flag.complains_of(&["teleport"]);
}

#[test]
fn a_flag_cannot_exceed_the_table() {
    let ended = under_table(TABLE, &["--memory", "512m"]).exited(125);
    ended.complains_of(&["--memory", "128", "narrow"]);
    let dir = tempfile::tempdir().unwrap();
    let folder = format!("{}:/data", text(dir.path()));
    under_table(TABLE, &["-v", &folder]).exited(125).complains_of(&["--volume", "narrow"]);
}

#[test]
fn a_table_without_memory_says_what_to_add() {
    let ended = under_table("version = 1\n[cpu]\ncount = 1\n", &[]).exited(125);
    assert!(ended.stderr.contains("memory"), "{}", ended.stderr);
}

#[test]
fn too_little_memory_is_refused() {
    let ended = run(["run", "--rm", "--memory", "1m", IMAGE, "true"]).exited(125);
    ended.complains_of(&["1048576", "memory", "--memory"]);
}

#[test]
fn amounts_that_are_none_are_refused() {
    for (flag, value) in
        [("--memory", "lots"), ("--cpus", "0"), ("--timeout", "soon"), ("--disk", "1")]
    {
        let ended = run(["run", "--rm", flag, value, IMAGE, "true"]).exited(125);
        let name = flag.trim_start_matches("--");
        assert!(ended.stderr.contains(name) || ended.stderr.contains("cpu"), "{}", ended.stderr);
        assert!(ended.stderr.starts_with("exocell: "), "{}", ended.stderr);
    }
}

#[test]
fn a_full_disk_in_the_cell_is_the_programs_error() {
    let root = PrivateRoot::with_image();
    let script = "dd if=/dev/zero of=/big bs=65536 count=1000";
    let ended = root.run_cell(&["--disk", "16m"], &["sh", "-c", script]).exited(1);
    assert!(ended.stderr.contains("No space left on device"), "{}", ended.stderr);
}

/// Runs `script` as root of fresh namespaces, `exocell` as `$EXOCELL`.
fn in_namespaces(flags: &[&str], root: &PrivateRoot, script: &str) -> Finished {
    let mut command = Command::new("unshare");
    command.args(flags).args(["sh", "-ec", script]);
    command.env("EXOCELL", program()).env("EXOCELL_ROOT", root.path()).env("DIR", root.dir.path());
    finish(&mut command, b"")
}

#[test]
fn a_full_store_is_said_and_unharmed() {
    let root = PrivateRoot::new();
    tiny_tree(&root.dir.path().join("tree"));
    fs::create_dir(root.dir.path().join("small")).unwrap();
    let script = "mount -t tmpfs -o size=1m none $DIR/small
        export EXOCELL_ROOT=$DIR/small
        code=0; $EXOCELL image import $DIR/tree --tag full:1 || code=$?
        $EXOCELL image ls --json
        mount -o remount,size=64m $DIR/small
        $EXOCELL image import $DIR/tree --tag later:1 > $DIR/small/id
        exit $code";
    let ended = in_namespaces(&["-m"], &root, script).exited(125);
    assert_eq!(ended.text(), "");
    assert!(ended.stderr.contains("no space left"), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("small") && ended.stderr.contains("image prune"),
        "{}",
        ended.stderr
    );
}

#[test]
fn no_room_for_a_cells_record_is_said() {
    let root = PrivateRoot::with_image();
    let script =
        "mkdir -p $EXOCELL_ROOT/cells; mount -t tmpfs -o nr_inodes=1 none $EXOCELL_ROOT/cells
        exec $EXOCELL run --rm tiny:latest true";
    let ended = in_namespaces(&["-m"], &root, script).exited(125);
    ended.complains_of(&["cells", "No space left"]);
}

/// A small file system as the state root, whose cells go at the end.
const SMALL: &str = "mkdir $DIR/small; mount -t tmpfs -o size=160m none $DIR/small
    ln -s $EXOCELL_ROOT/images $EXOCELL_ROOT/kernels $DIR/small; export EXOCELL_ROOT=$DIR/small
    trap 'for cell in $($EXOCELL ps -aq); do $EXOCELL rm -f $cell >&2; done' EXIT";
/// Leaves no byte of it: dd ends by the error that it is full, and by no other way.
const FILL: &str = "! dd if=/dev/zero of=$EXOCELL_ROOT/FILL bs=64k 2>/dev/null";

#[test]
fn a_cells_disk_leaves_the_host_room() {
    let root = PrivateRoot::with_image();
    let script = format!(
        "{SMALL}
        $EXOCELL run -d --name small -m 128m --disk 20m {TINY} sleep 1000 >&2
        $EXOCELL exec small dd if=/dev/zero of=/kept bs=1M count=4 conv=fsync >&2
        $EXOCELL run --name large -m 128m --disk 1g {TINY} \
            dd if=/dev/zero of=/x bs=1M count=900 conv=fsync >&2 && exit 9
        set -- $(stat -f -c '%a %S' $EXOCELL_ROOT); echo $(($1 * $2 / 1048576))
        $EXOCELL exec small dd if=/dev/zero of=/kept bs=1M count=4 conv=notrunc,fsync >&2
        $EXOCELL exec small dd if=/dev/zero of=/new bs=1M count=8 conv=fsync >&2 && exit 8
        $EXOCELL rm -f small large >&2; $EXOCELL ps -aq"
    );
    let ended = in_namespaces(&["-m"], &root, &script).ok();
    // Two disks may have looked at the same time.
    let free: u64 = ended.text().parse().unwrap();
    assert!((56..=72).contains(&free), "{free} MiB: {}", ended.stderr);
}

#[test]
fn a_full_disk_keeps_no_command_from_any_cell() {
    let root = PrivateRoot::with_image();
    let script = format!(
        "{SMALL}
        for name in ends killed stopped victim; do
            $EXOCELL run -d --name $name -m 128m --disk 8m --restart unless-stopped {TINY} \
                sleep 1000 >&2
        done
        $EXOCELL update --restart no ends >&2; $EXOCELL update --restart no killed >&2
        {FILL}
        kill -9 $($EXOCELL inspect ends | sed -n 's/.*supervisor_pid[^0-9]*\\([0-9]*\\).*/\\1/p')
        rm -f $EXOCELL_ROOT/cells/*/.status.spare; {FILL}
        $EXOCELL ps -a >&2; $EXOCELL inspect victim >&2; $EXOCELL logs ends >&2
        $EXOCELL exec victim sh -c 'echo alive'
        $EXOCELL stop -t 0 stopped >&2; $EXOCELL kill killed >&2
        $EXOCELL inspect --format '{{{{.State.Status}}}}' stopped killed victim
        $EXOCELL stats --no-stream >&2; $EXOCELL metrics >&2
        $EXOCELL rm -f victim; {FILL}
        $EXOCELL rm -f stopped killed ends; $EXOCELL ps -aq"
    );
    let ended = in_namespaces(&["-m"], &root, &script).ok();
    let told: Vec<&str> = ended.text().split_whitespace().collect();
    let expected = ["alive", "exited", "exited", "running", "victim", "stopped", "killed", "ends"];
    assert_eq!(told, expected, "{}", ended.stderr);
}

#[test]
fn a_host_without_user_namespaces_says_so() {
    let root = PrivateRoot::with_image();
    let script =
        format!("echo 0 > /proc/sys/user/max_user_namespaces; exec $EXOCELL run --rm {TINY} true");
    let ended = in_namespaces(&["-U", "-r"], &root, &script).exited(125);
    ended.complains_of(&["namespaces", "user.max_user_namespaces"]);
    root.holds_no_cells();
}

#[test]
fn a_chroot_says_that_it_is_one() {
    let root = PrivateRoot::with_image();
    let script = format!(
        "new=$EXOCELL_ROOT/new; mkdir $new; cd /
        for entry in *; do
            if [ -d $entry ]; then mkdir $new/$entry; mount --rbind $entry $new/$entry; fi
        done
        exec chroot $new $EXOCELL run --rm {TINY} true"
    );
    let ended = in_namespaces(&["-m"], &root, &script).exited(125);
    ended.complains_of(&["namespaces", "leave the chroot"]);
    root.holds_no_cells();
}

#[test]
fn errors_leave_no_record_behind() {
    let before = crate::common::host::records();
    let name = crate::common::unique("nothing");
    for flags in [&["--memory", "1m"][..], &["-v", "/no/such:/x"], &["--cap", "x=y"]] {
        run([&["run", "--name", &name], flags, &[IMAGE, "true"]].concat()).exited(125);
    }
    shell(&["--name", &name], "exit 1").exited(1);
    let after = crate::common::host::records();
    let own = after.difference(&before).filter(|id| {
        fs::read_to_string(crate::common::host::record(id).join("spec.json"))
            .is_ok_and(|spec| spec.contains(&name))
    });
    assert_eq!(own.count(), 0);
}

#[test]
fn a_damaged_record_is_swept() {
    let root = PrivateRoot::with_image();
    let directory = root.path().join("cells/00112233445566778899aabbccddeeff");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("spec.json"), "{ broken").unwrap();
    assert_eq!(root.run(["ps", "-aq"]).ok().text(), "");
    root.run_cell(&[], &["true"]).ok();
}

#[test]
fn an_ordinary_user_runs_a_cell() {
    const USER: u32 = 54_321;
    let root = PrivateRoot::with_image();
    let home = root.dir.path();
    let copied = home.join("exocell");
    fs::copy(program(), &copied).unwrap();
    fs::copy(init(), home.join("exocell-init")).unwrap();
    // The kernel may lie where only its owner gets to.
    let kernels = fs::read_link(root.path().join("kernels")).unwrap();
    fs::remove_file(root.path().join("kernels")).unwrap();
    Command::new("cp").arg("-r").args([&kernels, &root.path().join("kernels")]).status().unwrap();
    Command::new("chown").args(["-R", &USER.to_string()]).arg(home).status().unwrap();
    let user = USER.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(copied);
    command.args(["run", "--rm", TINY, "sh", "-c", "id -u; echo x > /f && cat /f; exit 4"]);
    command.env("EXOCELL_ROOT", root.path()).env("EXOCELL_INIT", home.join("exocell-init"));
    assert_eq!(finish(&mut command, b"").exited(4).text(), "0\nx");
    root.holds_no_cells();
}

/// The guest's init, as the command finds it.
fn init() -> std::path::PathBuf {
    match std::env::var_os("EXOCELL_INIT") {
        Some(path) => path.into(),
        None => program().with_file_name("exocell-init"),
    }
}
