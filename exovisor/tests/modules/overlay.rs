//! Folders that each tenant sees with changes of its own.

use exocell_exovisor::{
    Admission, Call, CallLimits, Function, Layers, Metering, Outcome, Policy, Report, Scheduler,
    SchedulerConfig, Spec, Tenant, Value,
};
use exocell_xgate::{CapabilitySet, CapsError, Table};
use std::path::Path;
use tempfile::TempDir;

use crate::common::{caps, table};

const NOSPC: i32 = 51;
const NOENT: i32 = 44;
const PERM: i32 = 63;
const NOTCAPABLE: i32 = 76;

/// Functions over the files of `/data`; each answers with the first errno that is not 0.
const FILES: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_readdir" (func $fd_readdir (param i32 i32 i32 i64 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_close" (func $fd_close (param i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_renumber" (func $renumber (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_prestat_get" (func $prestat (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_open" (func $path_open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_unlink_file" (func $unlink (param i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "path_symlink" (func $symlink (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 2)
  (data (i32.const 0) "file")
  (data (i32.const 16) "../file")
  (data (i32.const 32) "link")
  (func $open (param $path i32) (param $length i32) (param $flags i32) (result i32)
    (call $path_open (i32.const 3) (i32.const 1) (local.get $path) (local.get $length)
      (local.get $flags) (i64.const 66) (i64.const 0) (i32.const 0) (i32.const 100)))
  (func $piece (param $length i32)
    (i32.store (i32.const 200) (i32.const 1024)) (i32.store (i32.const 204) (local.get $length)))
  (func (export "put") (param $byte i32) (result i32) (local $n i32)
    (if (local.tee $n (call $open (i32.const 0) (i32.const 4) (i32.const 9))) (then (return (local.get $n))))
    (i32.store8 (i32.const 1024) (local.get $byte))
    (call $piece (i32.const 1))
    (if (local.tee $n (call $fd_write (i32.load (i32.const 100)) (i32.const 200) (i32.const 1) (i32.const 208)))
      (then (return (local.get $n))))
    (call $fd_close (i32.load (i32.const 100))))
  ;; What the file begins with, or 1000 and the errno.
  (func $get (export "get") (param $unused i32) (result i32) (local $n i32)
    (if (local.tee $n (call $path_open (i32.const 3) (i32.const 1) (i32.const 0) (i32.const 4)
        (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 100)))
      (then (return (i32.add (i32.const 1000) (local.get $n)))))
    (call $piece (i32.const 1))
    (if (local.tee $n (call $fd_read (i32.load (i32.const 100)) (i32.const 200) (i32.const 1) (i32.const 208)))
      (then (return (i32.add (i32.const 1000) (local.get $n)))))
    (i32.load8_u (i32.const 1024)))
  ;; Writes until it is refused.
  (func (export "fill") (param $unused i32) (result i32) (local $n i32)
    (if (local.tee $n (call $open (i32.const 0) (i32.const 4) (i32.const 9))) (then (return (local.get $n))))
    (call $piece (i32.const 65536))
    (loop $more
      (br_if $more (i32.eqz (local.tee $n
        (call $fd_write (i32.load (i32.const 100)) (i32.const 200) (i32.const 1) (i32.const 208))))))
    (local.get $n))
  (func (export "remove") (param $unused i32) (result i32) (call $unlink (i32.const 3) (i32.const 0) (i32.const 4)))
  (func (export "climb") (param $unused i32) (result i32) (call $open (i32.const 16) (i32.const 7) (i32.const 1)))
  ;; Through the link that is there, or one of its own making.
  (func (export "follow") (param $make i32) (result i32) (local $n i32)
    (if (local.get $make) (then
      (if (local.tee $n (call $symlink (i32.const 16) (i32.const 7) (i32.const 3) (i32.const 32) (i32.const 4)))
        (then (return (local.get $n))))))
    (call $open (i32.const 32) (i32.const 4) (i32.const 0)))
  ;; How many bytes the entries of the folder take.
  (func (export "list") (param $unused i32) (result i32)
    (drop (call $fd_readdir (i32.const 3) (i32.const 2048) (i32.const 4096) (i64.const 0) (i32.const 208)))
    (i32.load (i32.const 208)))
  ;; Puts the opened file in the folder's place, which ends the folder.
  (func (export "replace") (param $unused i32) (result i32) (local $n i32)
    (drop (call $open (i32.const 0) (i32.const 4) (i32.const 1)))
    (if (local.tee $n (call $renumber (i32.load (i32.const 100)) (i32.const 3))) (then (return (local.get $n))))
    (i32.store8 (i32.const 1024) (i32.const 33))
    (call $piece (i32.const 1))
    (if (local.tee $n (call $fd_write (i32.const 3) (i32.const 200) (i32.const 1) (i32.const 208)))
      (then (return (local.get $n))))
    (call $open (i32.const 0) (i32.const 4) (i32.const 0)))
  ;; Opens until it is refused.
  (func (export "hoard") (param $limit i32) (result i32) (local $n i32)
    (loop $more
      (if (local.tee $n (call $open (i32.const 0) (i32.const 4) (i32.const 1))) (then (return (local.get $n))))
      (br_if $more (local.tee $limit (i32.sub (local.get $limit) (i32.const 1)))))
    (i32.const 0))
)"#;

struct World {
    scheduler: Scheduler,
    admission: Admission,
    caps: CapabilitySet,
    table: Table,
}

/// A tenant, its module and what it changed.
struct Holder {
    tenant: Tenant,
    layers: Layers,
}

fn grant(folder: &Path, rights: &str, disk: &str) -> CapabilitySet {
    caps(&format!(
        "[memory]\nlimit = \"1M\"\n[disk]\nsize = \"{disk}\"\n[[folder]]\nhost = \"{}\"\nguest = \"/data\"\nrights = [{rights}]",
        folder.display()
    ))
}

impl World {
    fn new(folder: &Path, disk: &str) -> Self {
        let caps = grant(folder, r#""read", "overlay""#, disk);
        let scheduler = Scheduler::new(&SchedulerConfig::default()).unwrap();
        let admission = Admission::new(Policy::default());
        Self { scheduler, admission, table: table(&caps), caps }
    }

    fn tenant(&self, name: &str) -> Holder {
        let tenant = self.scheduler.tenant(name, 1, exocell_exovisor::Priority::Normal);
        Holder { tenant, layers: Layers::default() }
    }

    fn function(&self, holder: &Holder, name: &str) -> Function {
        let owner = holder.tenant.name();
        let admitted =
            self.admission.admit_for(owner, FILES.as_bytes(), &self.caps, Metering::Time).unwrap();
        admitted.function(owner, name).unwrap()
    }

    fn call(&self, holder: &Holder, name: &str, argument: i32) -> i32 {
        let spec = Spec { layers: holder.layers.clone(), ..Spec::default() };
        let attached = self.scheduler.attach(&self.table, "isolate", spec).unwrap();
        let limits =
            CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
        let function = self.function(holder, name);
        let call = Call::new(&function, &[Value::I32(argument)], limits).with(attached);
        match self.scheduler.run(&holder.tenant, call).unwrap() {
            Report { outcome: Outcome::Exited(0), results, .. } => match results[..] {
                [Value::I32(result)] => result,
                _ => panic!("{results:?}"),
            },
            report => panic!("{name}: {report:?}"),
        }
    }
}

#[test]
fn tenants_do_not_see_each_others_changes() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("file"), "base").unwrap();
    let world = World::new(folder.path(), "1M");
    let (one, other) = (world.tenant("one"), world.tenant("other"));
    assert_eq!(world.call(&one, "put", 1), 0);
    assert_eq!(world.call(&other, "get", 0), i32::from(b'b'));
    assert_eq!(world.call(&other, "put", 2), 0);
    // Each call is a new isolate; the layer is the tenant's.
    assert_eq!((world.call(&one, "get", 0), world.call(&other, "get", 0)), (1, 2));
    let both = world.call(&one, "list", 0);
    assert_eq!(world.call(&one, "remove", 0), 0);
    assert_eq!(world.call(&one, "get", 0), 1000 + NOENT);
    assert_eq!(both - world.call(&one, "list", 0), 24 + 4);
    assert_eq!(world.call(&other, "get", 0), 2);
    assert_eq!(world.call(&world.tenant("third"), "get", 0), i32::from(b'b'));
    assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"base");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_tenants_changes_are_bounded() {
    let folder = TempDir::new().unwrap();
    let world = World::new(folder.path(), "1M");
    let (one, other) = (world.tenant("one"), world.tenant("other"));
    assert_eq!(world.call(&one, "fill", 0), NOSPC);
    assert!((900 << 10..=1 << 20).contains(&one.layers.bytes()), "{}", one.layers.bytes());
    assert_eq!(world.call(&other, "put", 2), 0);
    assert_eq!(world.call(&one, "remove", 0), 0);
    assert_eq!(world.call(&one, "put", 1), 0);
    assert!(one.layers.bytes() < 8 << 10, "{}", one.layers.bytes());
    // Descriptors are bounded too, and go with the call.
    assert_ne!(world.call(&one, "hoard", 100_000), 0);
    assert_eq!(world.call(&one, "hoard", 500), 0);
}

#[test]
fn nothing_outside_the_folder_is_reached() {
    let outer = TempDir::new().unwrap();
    let folder = outer.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(outer.path().join("file"), "secret").unwrap();
    let world = World::new(&folder, "1M");
    let one = world.tenant("one");
    assert_eq!(world.call(&one, "climb", 0), PERM);
    assert_eq!(world.call(&one, "follow", 1), PERM);
    std::os::unix::fs::symlink("../file", folder.join("link")).unwrap();
    assert_eq!(world.call(&world.tenant("other"), "follow", 0), PERM);
    std::fs::remove_file(folder.join("link")).unwrap();
    std::os::unix::fs::symlink(outer.path().join("file"), folder.join("link")).unwrap();
    assert_eq!(world.call(&world.tenant("third"), "follow", 0), PERM);
    assert_eq!(std::fs::read(outer.path().join("file")).unwrap(), b"secret");
}

#[test]
fn a_descriptor_can_take_the_folders_place() {
    let folder = TempDir::new().unwrap();
    let world = World::new(folder.path(), "1M");
    let one = world.tenant("one");
    const NOTDIR: i32 = 54;
    assert_eq!(world.call(&one, "replace", 0), NOTDIR);
    assert_eq!(world.call(&one, "get", 0), 33);
}

#[test]
fn revoking_acts_on_a_layer_too() {
    let folder = TempDir::new().unwrap();
    let mut world = World::new(folder.path(), "1M");
    let one = world.tenant("one");
    assert_eq!(world.call(&one, "put", 1), 0);
    let handle = world.table.find("isolate", "folder:/data").unwrap();
    let function = world.function(&one, "get");
    let spec = Spec { layers: one.layers.clone(), ..Spec::default() };
    let attached = world.scheduler.attach(&world.table, "isolate", spec).unwrap();
    world.table.revoke(handle).unwrap();
    let limits =
        CallLimits { memory_bytes: 1 << 20, deadline: None, cpu_ns: None, threads: 0, fuel: 0 };
    let call = Call::new(&function, &[Value::I32(0)], limits).with(attached);
    let report = world.scheduler.run(&one.tenant, call).unwrap();
    assert_eq!(report.results, [Value::I32(1000 + NOTCAPABLE)]);
}

#[test]
fn a_layer_needs_a_limit_and_no_right_to_write() {
    let text = |more: &str| {
        format!("version = 1\n{more}[[folder]]\nhost = \"/h\"\nguest = \"/g\"\nrights = ")
    };
    let error = |text: &str| -> CapsError {
        CapabilitySet::parse(text, Path::new("/")).expect_err("it is refused")
    };
    let unbounded = error(&format!("{}[\"read\", \"overlay\"]", text(""))).to_string();
    assert!(unbounded.contains("[disk]") && unbounded.contains("/g"), "{unbounded}");
    let disk = "[disk]\nsize = \"1M\"\n";
    let both = error(&format!("{}[\"read\", \"write\", \"overlay\"]", text(disk))).to_string();
    assert!(both.contains("`write` and `overlay`"), "{both}");
}
