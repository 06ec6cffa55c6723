//! From a container's OCI runtime specification to what the guest's init carries out.
//!
//! ```text
//! config.json ── what the host has to do: root, binds, network ──> depot, cell
//!      ├──────── what the guest does: all that `exocell_cell::oci` has a field for
//!      └──────── all else ──> refused by its name
//! ```
//! What is asked for and not done is refused, unless it changes nothing in a cell. Then a comment
//! here says why.

use std::path::{Path, PathBuf};

use exocell_cell::agent::oci::{CAPABILITIES, Spec};
use exocell_cell::oci;
use serde_json::{Map, Value, json};

use crate::config::{Config, LeftOut};
use crate::error::{Result, ShimError};
use crate::hooks::Hooks;
use crate::refusal::{is_empty, refused, said};
use crate::{resources, seccomp};

type Object = Map<String, Value>;

/// What a container is to be.
#[derive(Debug)]
pub struct Wanted {
    /// What the guest carries out. The source of a bind is its name in the depot.
    pub spec: Spec,
    /// The directory on which the root is, unless containerd hands mounts over.
    pub root: PathBuf,
    pub binds: Vec<Bind>,
    /// Empty where it is the pod's.
    pub hostname: String,
    /// The network namespace of the host that it is to be in; `None` is one of its own, in which
    /// there is nothing.
    pub network: Option<PathBuf>,
    /// Processes of the host whose namespaces it is to share.
    pub shares_with: Vec<u32>,
    /// Whether that of pids is among them.
    pub shares_pids: bool,
    /// The filter of its programs' system calls; empty where there is none.
    pub filter: Vec<u64>,
    /// The host's control group for it (`linux.cgroupsPath`); empty where none is named.
    pub cgroups_path: String,
    /// Programs of the host's that are to run when it changes its state.
    pub hooks: Hooks,
    pub annotations: std::collections::BTreeMap<String, String>,
}

/// A file or directory of the host that a container has.
#[derive(Debug, PartialEq, Eq)]
pub struct Bind {
    /// In the container's directory of the depot.
    pub name: String,
    pub source: PathBuf,
    pub destination: String,
    pub writable: bool,
    /// Whether what the host has mounted below comes, too.
    pub recursive: bool,
    /// Whether what the host mounts below later comes, too (`rslave`).
    pub follows: bool,
}

/// Reads the specification of the container whose bundle is at `folder`.
///
/// # Errors
/// Names what of it a cell does not carry out.
pub fn translate(specification: Value, folder: &Path, config: &Config) -> Result<Wanted> {
    let mut specification = object("the specification", specification)?;
    let hooks = hooks(specification.remove("hooks"))?;
    let annotations = specification.remove("annotations").filter(|value| !value.is_null());
    let annotations = annotations.map(serde_json::from_value).transpose();
    let annotations = annotations
        .map_err(|error| ShimError::invalid(format!("the annotations: {error}")))?
        .unwrap_or_default();
    let process = taken_object(&mut specification, "process")?;
    specification.insert("process".to_owned(), check_process(process, config)?.into());
    let mut linux = taken_object(&mut specification, "linux")?;
    let Namespaces { network, shares_with, shares_pids } = namespaces(&mut linux)?;
    let cgroups_path =
        linux.remove("cgroupsPath").and_then(|path| path.as_str().map(str::to_owned));
    let filter = match said(&mut linux, "seccomp") {
        Some(_) if config.leaves_out(LeftOut::Seccomp) => Vec::new(),
        Some(profile) => seccomp::compile(profile)?,
        None => Vec::new(),
    };
    let linux = check_linux(linux, config)?;
    specification.insert("linux".to_owned(), linux.into());
    let (mounts, binds) = mounts(specification.remove("mounts"))?;
    specification.insert("mounts".to_owned(), mounts);
    let hostname = specification.remove("hostname");
    let hostname = hostname.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default();
    let root = specification.get("root").and_then(|root| root.get("path")).and_then(Value::as_str);
    let root = folder.join(root.unwrap_or("rootfs"));
    // Of docker's engine: what is null is not there.
    specification.retain(|_, value| !value.is_null());
    let spec = oci::read(&Value::Object(specification).to_string())?;
    if spec.process.args.is_empty() {
        return Err(ShimError::invalid("the specification names no program (process.args)"));
    }
    Ok(Wanted {
        spec,
        root,
        binds,
        hostname,
        network,
        shares_with,
        shares_pids,
        filter,
        cgroups_path: cgroups_path.unwrap_or_default(),
        hooks,
        annotations,
    })
}

/// A process of an exec, as the guest's init is told of it.
///
/// # Errors
/// Names what of it a cell does not carry out.
pub fn process(wanted: Value, config: &Config) -> Result<exocell_cell::agent::oci::Process> {
    let checked = check_process(object("the process", wanted)?, config)?;
    serde_json::from_value(checked.into()).map_err(|error| {
        ShimError::invalid(format!("a cell does not carry out all of it: {error}"))
    })
}

fn object(what: &str, value: Value) -> Result<Object> {
    match value {
        Value::Object(object) => Ok(object),
        Value::Null => Ok(Object::new()),
        _ => Err(ShimError::invalid(format!("{what} is no JSON object"))),
    }
}

fn taken_object(from: &mut Object, name: &str) -> Result<Object> {
    object(name, from.remove(name).unwrap_or_default())
}

/// Those that run outside of the container: in it there is no program of the host's.
fn hooks(hooks: Option<Value>) -> Result<Hooks> {
    let mut hooks = object("hooks", hooks.unwrap_or_default())?;
    hooks.retain(|_, list| !is_empty(list));
    if let Some(kind) =
        ["createContainer", "startContainer"].iter().find(|kind| hooks.contains_key(**kind))
    {
        return Err(refused(
            format_args!("the hook {kind}"),
            "it would run in the container, which has no program of the host's; leave it out",
        ));
    }
    serde_json::from_value(hooks.into()).map_err(|error| {
        ShimError::invalid(format!("a cell does not carry out all hooks: {error}"))
    })
}

fn check_process(mut process: Object, config: &Config) -> Result<Object> {
    let labels = [("selinuxLabel", LeftOut::Selinux), ("apparmorProfile", LeftOut::Apparmor)];
    for (name, kind) in labels {
        if said(&mut process, name).is_some() {
            config.leave_out(kind, &format!("process.{name}"))?;
        }
    }
    for name in ["scheduler", "ioPriority", "execCPUAffinity", "commandLine"] {
        if said(&mut process, name).is_some() {
            return Err(refused(format_args!("process.{name}"), "leave it out"));
        }
    }
    process.retain(|_, value| !value.is_null());
    if let Some(Value::Object(user)) = process.get_mut("user") {
        // Windows's name of the user.
        said(user, "username");
        user.retain(|_, value| !value.is_null());
    }
    if let Some(Value::Object(sets)) = process.get_mut("capabilities") {
        sets.retain(|_, value| !value.is_null());
        check_capabilities(sets)?;
    }
    Ok(process)
}

/// One that this kernel does not know is told of here, and not when the program is to start.
fn check_capabilities(sets: &Object) -> Result<()> {
    let names = sets.values().filter_map(Value::as_array).flatten().filter_map(Value::as_str);
    let is_known =
        |name: &&str| CAPABILITIES.iter().any(|known| name.strip_prefix("CAP_") == Some(known));
    match names.into_iter().find(|name| !is_known(name)) {
        None => Ok(()),
        Some(name) => Err(ShimError::invalid(format!("there is no capability {name:?}"))),
    }
}

fn check_linux(mut linux: Object, config: &Config) -> Result<Object> {
    if said(&mut linux, "mountLabel").is_some() {
        config.leave_out(LeftOut::Selinux, "linux.mountLabel")?;
    }
    if let Some(propagation) = said(&mut linux, "rootfsPropagation")
        && matches!(propagation.as_str(), Some("shared" | "rshared"))
    {
        // All others say that the host learns of no mount, which it does not.
        return Err(refused("linux.rootfsPropagation shared", "a guest's mounts stay in it"));
    }
    for name in ["uidMappings", "gidMappings", "intelRdt", "personality", "timeOffsets"] {
        if said(&mut linux, name).is_some() {
            return Err(refused(format_args!("linux.{name}"), "leave it out"));
        }
    }
    let devices = linux.remove("devices").unwrap_or_default();
    linux.insert("devices".to_owned(), resources::devices(devices)?);
    let limits = taken_object(&mut linux, "resources")?;
    linux.insert("resources".to_owned(), resources::translate(limits)?.into());
    linux.retain(|_, value| !value.is_null());
    Ok(linux)
}

/// The namespaces of others that a container is to be in.
struct Namespaces {
    network: Option<PathBuf>,
    shares_with: Vec<u32>,
    shares_pids: bool,
}

/// What of the host's namespaces is named. What is left of `linux` names those that each container
/// has of its own.
fn namespaces(linux: &mut Object) -> Result<Namespaces> {
    let named = linux.remove("namespaces").unwrap_or_default();
    let named = named.as_array().cloned().unwrap_or_default();
    let (mut network, mut shares_with, mut kinds) = (None, Vec::new(), Vec::new());
    let mut shares_pids = false;
    for namespace in &named {
        let kind = namespace.get("type").and_then(Value::as_str).unwrap_or_default();
        let path = namespace.get("path").and_then(Value::as_str).filter(|path| !path.is_empty());
        match (kind, path) {
            ("network", Some(path)) => network = Some(PathBuf::from(path)),
            ("ipc" | "uts", Some(path)) => shares_with.push(owner(kind, path)?),
            ("pid", Some(path)) => {
                shares_with.push(owner(kind, path)?);
                shares_pids = true;
            }
            ("cgroup" | "mount", Some(_)) | ("user" | "time", _) => {
                return Err(refused(format_args!("the namespace {kind}"), "leave it out"));
            }
            _ => {}
        }
        kinds.push(kind.to_owned());
    }
    for (kind, what) in [
        ("network", "the host's network (hostNetwork)"),
        ("pid", "the host's processes (hostPID)"),
        ("ipc", "the host's IPC (hostIPC)"),
        ("uts", "the host's name"),
    ] {
        if !kinds.iter().any(|named| named == kind) {
            return Err(refused(
                what,
                "a cell is apart from the host; ask for a namespace of its own",
            ));
        }
    }
    let own = ["pid", "mount", "ipc", "uts", "cgroup"].map(|kind| json!({ "type": kind }));
    linux.insert("namespaces".to_owned(), own.to_vec().into());
    Ok(Namespaces { network, shares_with, shares_pids })
}

/// The process in `/proc/PID/ns/KIND`.
fn owner(kind: &str, path: &str) -> Result<u32> {
    let pid = path.strip_prefix("/proc/").and_then(|rest| rest.split_once("/ns/"));
    let pid = pid.and_then(|(pid, _)| pid.parse().ok());
    pid.ok_or_else(|| {
        refused(format_args!("the {kind} namespace {path}"), "only that of its pod can be shared")
    })
}

/// What the guest mounts, and what of the host is bound.
fn mounts(wanted: Option<Value>) -> Result<(Value, Vec<Bind>)> {
    let wanted = wanted.unwrap_or_default();
    let (mut mounts, mut binds) = (Vec::new(), Vec::new());
    for mount in wanted.as_array().into_iter().flatten() {
        let mut mount = object("a mount", mount.clone())?;
        let text =
            |name: &str| mount.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, source, destination) = (text("type"), text("source"), text("destination"));
        for name in ["uidMappings", "gidMappings"] {
            if said(&mut mount, name).is_some() {
                return Err(refused(format_args!("{name} of {destination}"), "leave it out"));
            }
        }
        mount.retain(|_, value| !value.is_null());
        let options = mount.get("options").and_then(Value::as_array).cloned().unwrap_or_default();
        let no_text = || ShimError::invalid(format!("an option of {destination} is no text"));
        let options: Vec<&str> = options
            .iter()
            .map(|option| option.as_str().ok_or_else(no_text))
            .collect::<Result<_>>()?;
        let has = |word: &str| options.contains(&word);
        let is_bind = has("bind") || has("rbind") || kind == "bind";
        check_propagation(&options, &destination, is_bind)?;
        if is_bind {
            let name = format!("m{}", binds.len());
            let recursive = has("rbind");
            let follows = has("rslave") || has("slave");
            let others = bind_options(&options, &destination)?;
            // The last one wins, as in mount(8).
            let last = others.iter().rev().find(|word| matches!(**word, "ro" | "rw"));
            let writable = last != Some(&"ro");
            let options: Vec<&str> = std::iter::once("rbind").chain(others).collect();
            binds.push(Bind {
                name: name.clone(),
                source: source.into(),
                destination: destination.clone(),
                writable,
                recursive,
                follows,
            });
            mounts.push(json!({
                "destination": destination, "type": "bind", "source": name, "options": options,
            }));
            continue;
        }
        if !["proc", "sysfs", "cgroup", "cgroup2", "mqueue", "tmpfs", "devpts"].contains(&&*kind) {
            return Err(refused(
                format_args!("the mount of {kind:?} on {destination}"),
                "a guest has proc, sysfs, cgroup, mqueue, tmpfs, devpts, and what is bound",
            ));
        }
        mounts.push(mount.into());
    }
    Ok((mounts.into(), binds))
}

/// What a guest mounts stays in it; what the host mounts comes below a bind that asks for it.
fn check_propagation(options: &[&str], destination: &str, is_bind: bool) -> Result<()> {
    let none = ["shared", "rshared", "unbindable", "runbindable"];
    let refused_here =
        |option: &&&str| none.contains(*option) || (option.ends_with("slave") && !is_bind);
    match options.iter().find(refused_here) {
        None => Ok(()),
        Some(option) => Err(refused(
            format_args!("the option {option} of the mount on {destination}"),
            "what a guest mounts stays in it (rprivate), or a bind follows the host (rslave)",
        )),
    }
}

/// What the guest is told of a bind's options (OCI runtime specification, "Linux mount options").
/// In the guest a bind is one mount with all that the host has below it, so what is asked for that
/// (`rro`) is what is asked for the mount itself.
fn bind_options<'a>(options: &[&'a str], destination: &str) -> Result<Vec<&'a str>> {
    let mut told = Vec::new();
    for option in options {
        match *option {
            // Said beside, or as all mounts of a guest are.
            "bind" | "rbind" | "slave" | "rslave" | "private" | "rprivate" | "defaults"
            | "async" | "silent" | "loud" => {}
            "ro" | "rw" | "nosuid" | "suid" | "nodev" | "dev" | "noexec" | "exec" | "noatime"
            | "atime" | "nodiratime" | "diratime" | "relatime" | "norelatime" | "strictatime"
            | "nostrictatime" => told.push(*option),
            "rro" | "rnosuid" | "rnodev" | "rnoexec" | "rnoatime" | "ratime" | "rnodiratime"
            | "rdiratime" | "rrelatime" | "rnorelatime" | "rstrictatime" | "rnostrictatime" => {
                told.push(&option[1..]);
            }
            // What the host has mounted read-only below stays so.
            _ => {
                return Err(refused(
                    format_args!("the option {option} of the bind on {destination}"),
                    "leave it out; a bind takes ro, rro, rw, nosuid, nodev, noexec, options of \
                     access times, and rslave",
                ));
            }
        }
    }
    Ok(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Value {
        json!({
            "ociVersion": "1.1.0",
            "process": {
                "user": { "uid": 5, "gid": 6, "additionalGids": [7] }, "args": ["sh"],
                "env": ["A=b"], "cwd": "/w", "noNewPrivileges": true,
                "capabilities": { "bounding": ["CAP_CHOWN"], "ambient": null },
                "rlimits": [{ "type": "RLIMIT_NOFILE", "hard": 9, "soft": 8 }],
            },
            "root": { "path": "rootfs", "readonly": true },
            "hostname": "h",
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "proc" },
                { "destination": "/data", "type": "bind", "source": "/srv",
                  "options": ["rbind", "ro", "rslave"] },
            ],
            "linux": {
                "cgroupsPath": "/x/y",
                "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" },
                    { "type": "mount" }, { "type": "network" }],
                "resources": { "memory": { "limit": 1000 }, "devices": [{ "allow": false, "access": "rwm" }] },
                "maskedPaths": ["/proc/kcore"],
            },
            "annotations": { "a": "b" },
        })
    }

    fn read(specification: Value) -> Result<Wanted> {
        translate(specification, Path::new("/b"), &Config::default())
    }

    #[test]
    fn a_specification_is_carried_out_as_a_whole() {
        let wanted = read(plain()).unwrap();
        let process = &wanted.spec.process;
        assert_eq!((process.user.uid, process.user.gid, process.cwd.as_str()), (5, 6, "/w"));
        assert!(process.no_new_privileges && wanted.spec.root.unwrap().readonly);
        assert_eq!((wanted.root, wanted.hostname.as_str()), (PathBuf::from("/b/rootfs"), "h"));
        let [bind] = &wanted.binds[..] else { panic!("{:?}", wanted.binds) };
        assert_eq!((bind.source.as_path(), bind.writable), (Path::new("/srv"), false));
        assert!(bind.follows && !wanted.spec.mounts[1].options.contains(&"rslave".to_owned()));
        assert_eq!(wanted.spec.mounts[1].source, bind.name);
        assert_eq!(wanted.spec.linux.namespaces.len(), 5);
        assert_eq!(wanted.spec.linux.resources.unwrap().memory.unwrap().limit, Some(1000));
        assert_eq!(wanted.annotations["a"], "b");
        assert_eq!((wanted.cgroups_path.as_str(), wanted.filter.len()), ("/x/y", 0));
        // Nobody but init's own operator has annotations for init.
        assert!(wanted.spec.annotations.is_empty());
    }

    #[test]
    fn what_is_not_carried_out_is_refused_by_name() {
        for (path, value, name) in [
            ("/hooks", json!({ "startContainer": [{ "path": "/h" }] }), "startContainer"),
            ("/process/selinuxLabel", json!("x"), "selinuxLabel"),
            ("/process/scheduler", json!({ "policy": "SCHED_FIFO" }), "scheduler"),
            ("/process/capabilities/bounding", json!(["CAP_GOD"]), "CAP_GOD"),
            ("/process/what", json!(1), "what"),
            ("/process/args", json!([]), "process.args"),
            ("/linux/seccomp", json!({ "defaultAction": "SCMP_ACT_NOTIFY" }), "SCMP_ACT_NOTIFY"),
            ("/linux/uidMappings", json!([{}]), "uidMappings"),
            ("/linux/what", json!({}), "what"),
            ("/linux/namespaces", json!([{ "type": "pid" }]), "hostNetwork"),
            (
                "/linux/resources/hugepageLimits",
                json!([{ "pageSize": "2MB", "limit": 1 }]),
                "hugepage",
            ),
            ("/mounts/0/type", json!("nfs"), "nfs"),
            ("/mounts/1/options", json!(["rbind", "rshared"]), "rshared"),
            ("/mounts/0/options", json!(["rslave"]), "rslave"),
            ("/mounts/1/options", json!(["rbind", "readonly"]), "readonly"),
            ("/mounts/1/options", json!(["rbind", "RO"]), "RO"),
            ("/mounts/1/options", json!(["rbind", "rrw"]), "rrw"),
            ("/mounts/1/options", json!(["rbind", "ridmap"]), "ridmap"),
            ("/mounts/1/options", json!(["rbind", 7]), "no text"),
            ("/vm", json!({ "kernel": {} }), "vm"),
        ] {
            let mut specification = plain();
            let (parent, last) = path.rsplit_once('/').unwrap();
            specification.pointer_mut(parent).unwrap()[match last.parse::<usize>() {
                Ok(_) => unreachable!(),
                Err(_) => last,
            }] = value;
            let error = read(specification).map(|wanted| wanted.spec).unwrap_err().to_string();
            assert!(error.contains(name), "{path}: {error}");
        }
    }

    #[test]
    fn a_bind_is_read_only_by_each_word_for_it_and_the_last_one_wins() {
        for (words, writable) in [
            (&["rbind", "rro"][..], false),
            (&["ro"], false),
            (&["rbind", "rw", "ro"], false),
            (&["rbind", "ro", "rw"], true),
            (&["rbind", "rro", "rnosuid", "ratime"], false),
            (&[], true),
        ] {
            let mut specification = plain();
            specification["mounts"][1]["options"] = json!(words);
            let wanted = read(specification).unwrap();
            assert_eq!(wanted.binds[0].writable, writable, "{words:?}");
            let told = &wanted.spec.mounts[1].options;
            assert_eq!(told.contains(&"ro".to_owned()), !writable || words.contains(&"ro"));
            assert!(
                told.iter().all(|word| word == "rbind" || !word.starts_with("rro")),
                "{told:?}"
            );
        }
    }

    #[test]
    fn programs_of_the_pod_may_be_seen() {
        let mut specification = plain();
        specification["linux"]["namespaces"][0] =
            json!({ "type": "pid", "path": "/proc/7/ns/pid" });
        specification["linux"]["seccomp"] = json!({ "defaultAction": "SCMP_ACT_ALLOW" });
        let wanted = read(specification).unwrap();
        assert_eq!((wanted.shares_with, wanted.shares_pids), (vec![7], true));
        assert!(!wanted.filter.is_empty());
    }

    #[test]
    fn what_says_nothing_is_not_refused() {
        let mut specification = plain();
        specification["hooks"] =
            json!({ "startContainer": [], "createRuntime": [{ "path": "/h" }] });
        specification["process"]["apparmorProfile"] = json!("");
        specification["linux"]["seccomp"] = Value::Null;
        specification["linux"]["uidMappings"] = json!([]);
        assert_eq!(read(specification).unwrap().hooks.create_runtime.len(), 1);
    }
}
