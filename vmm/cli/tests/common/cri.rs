//! A containerd with its CRI plugin, and the real `crictl` against it: pods of cells, in networks
//! that CNI's plugins make.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

use serde_json::{Value, json};

use super::containerd::{Containerd, write_archive};
use super::{Finished, Started, finish, text, unique};

/// What the images are called: busybox, and the same as the first of a pod.
const IMAGE: &str = "exocell.test/busybox:1";
const PAUSE: &str = "exocell.test/pause:1";
/// Where Debian has CNI's plugins.
const PLUGINS: &str = "/usr/lib/cni";

/// The Container Runtime Interface of a test's own.
pub struct Cri {
    pub containerd: Containerd,
    crictl: PathBuf,
    bridge: String,
    /// The host's address in the network of pods.
    pub gateway: Ipv4Addr,
}

impl Cri {
    /// `None` where there is no `crictl`. `config` is of the shim's file.
    pub fn start(config: &str) -> Option<Self> {
        static NEXT: AtomicU8 = AtomicU8::new(0);
        let crictl = std::env::var_os("EXOCELL_TEST_CRICTL").filter(|path| !path.is_empty());
        let Some(crictl) = crictl.map(PathBuf::from) else {
            eprintln!("no crictl is here: the Container Runtime Interface is not tested");
            return None;
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (high, low) = (std::process::id() % 250, 16 * number);
        let bridge = format!("exocri{high}n{number}");
        let gateway = Ipv4Addr::new(10, 213, high as u8, low + 1);
        let containerd = Containerd::start_with(config, |at| plugin(at, &bridge, gateway));
        let cri = Self { containerd, crictl, bridge, gateway };
        cri.import();
        Some(cri)
    }

    fn import(&self) {
        let tree = tempfile::tempdir().expect("a folder");
        write_tree(tree.path());
        let archive = self.containerd.path("busybox.tar");
        let images: [(&str, &[&str]); 2] = [(IMAGE, &["sh"]), (PAUSE, &["sleep", "1000000"])];
        write_archive(&archive, tree.path(), &images);
        self.containerd.ctr(&["-n", "k8s.io", "images", "import", text(&archive)]).ok();
    }

    /// `crictl ARGS`.
    pub fn command(&self, args: &[&str]) -> Command {
        let config = self.containerd.path("crictl.yaml");
        std::fs::write(&config, "timeout: 60\n").expect("a file");
        let socket = format!("unix://{}", self.containerd.path("sock").display());
        let mut command = Command::new(&self.crictl);
        command.arg("--config").arg(config).args(["-r", &socket, "-i", &socket]).args(args);
        command
    }

    /// Runs `crictl ARGS` to its end.
    #[track_caller]
    pub fn crictl(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args), b"")
    }

    fn write(&self, name: &str, value: &Value) -> String {
        let path = self.containerd.path(name);
        std::fs::write(&path, value.to_string()).expect("a file");
        path.display().to_string()
    }

    /// A pod that runs, `more` of its configuration; its id.
    #[track_caller]
    pub fn pod(&self, more: Value) -> String {
        self.try_pod(more).ok().text().to_owned()
    }

    #[track_caller]
    pub fn try_pod(&self, more: Value) -> Finished {
        let name = unique("pod");
        let mut pod = json!({
            "metadata": { "name": name, "namespace": "default", "uid": name, "attempt": 1 },
            "hostname": "of-pod",
            "log_directory": self.containerd.path("logs"),
            "linux": { "security_context": { "namespace_options": { "pid": 1 } } },
        });
        merge(&mut pod, more);
        let file = self.write("pod.json", &pod);
        self.crictl(&["runp", "--runtime", "exocell", &file])
    }

    /// A container of `pod` that runs `script`, not started yet; its id. `more` is of its
    /// configuration; that of the pod made last is taken for the pod's.
    #[track_caller]
    pub fn create(&self, pod: &str, script: &str, more: Value) -> String {
        let name = unique("container");
        let mut container = json!({
            "metadata": { "name": name },
            "image": { "image": IMAGE },
            "command": ["sh", "-c", script],
            "log_path": format!("{name}.log"),
            "linux": { "security_context": { "namespace_options": { "pid": 1 } } },
        });
        merge(&mut container, more);
        let file = self.write("container.json", &container);
        let pod_file = self.containerd.path("pod.json");
        self.crictl(&["create", pod, &file, text(&pod_file)]).ok().text().to_owned()
    }

    /// The same, started.
    #[track_caller]
    pub fn container(&self, pod: &str, script: &str, more: Value) -> String {
        let id = self.create(pod, script, more);
        self.crictl(&["start", &id]).ok();
        id
    }

    /// The same, run to its end; all that it wrote.
    #[track_caller]
    pub fn said(&self, pod: &str, script: &str, more: Value) -> String {
        let id = self.container(pod, script, more);
        super::eventually("it ends", || self.state(&id) == "CONTAINER_EXITED");
        let said = self.crictl(&["logs", &id]).ok();
        said.text().to_owned() + &said.stderr
    }

    /// What `crictl inspect` says of a container's status.
    #[track_caller]
    pub fn status(&self, id: &str) -> Value {
        self.crictl(&["inspect", id]).ok().json()["status"].take()
    }

    #[track_caller]
    pub fn state(&self, id: &str) -> String {
        self.status(id)["state"].as_str().unwrap_or_default().to_owned()
    }

    /// The address of a pod.
    #[track_caller]
    pub fn address(&self, pod: &str) -> Ipv4Addr {
        let said = self.crictl(&["inspectp", pod]).ok().json();
        said["status"]["network"]["ip"].as_str().unwrap().parse().expect("an address")
    }

    /// A program beside a container's own.
    #[track_caller]
    pub fn exec(&self, id: &str, script: &str) -> Finished {
        self.crictl(&["exec", id, "sh", "-c", script])
    }

    /// A client that goes on, its streams the test's.
    pub fn started(&self, args: &[&str]) -> Started {
        Started::new(&mut self.command(args))
    }
}

impl Drop for Cri {
    fn drop(&mut self) {
        self.crictl(&["rmp", "--force", "--all"]);
        let _ = Command::new("ip").args(["link", "delete", &self.bridge]).output();
    }
}

/// Puts what `more` says into `value`.
fn merge(value: &mut Value, more: Value) {
    match (value, more) {
        (Value::Object(value), Value::Object(more)) => {
            for (name, own) in more {
                merge(value.entry(name).or_insert(Value::Null), own);
            }
        }
        (value, more) => *value = more,
    }
}

/// The plugin's configuration, and that of the network of pods.
fn plugin(at: &Path, bridge: &str, gateway: Ipv4Addr) -> String {
    let [a, b, c, d] = gateway.octets();
    let network = json!({
        "cniVersion": "1.0.0", "name": bridge,
        "plugins": [{
            "type": "bridge", "bridge": bridge, "isGateway": true,
            "ipam": {
                "type": "host-local", "dataDir": at.join("addresses"),
                "ranges": [[{ "subnet": format!("{a}.{b}.{c}.{}/28", d - 1) }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    });
    std::fs::create_dir_all(at.join("net")).expect("a folder");
    std::fs::create_dir_all(at.join("logs")).expect("a folder");
    std::fs::write(at.join("net/10-test.conflist"), network.to_string()).expect("a file");
    let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
    format!(
        "[{cri}]\nsandbox_image = \"{PAUSE}\"\nstream_server_port = \"0\"\n\
         [{cri}.cni]\nbin_dir = \"{PLUGINS}\"\nconf_dir = \"{}/net\"\n\
         [{cri}.containerd]\ndefault_runtime_name = \"exocell\"\n\
         [{cri}.containerd.runtimes.exocell]\nruntime_type = \"io.containerd.exocell.v1\"\n\
         privileged_without_host_devices = true\n",
        at.display()
    )
}

/// Debian's static busybox under all of its names.
fn write_tree(at: &Path) {
    use std::os::unix::fs::symlink;
    for folder in ["bin", "etc", "tmp", "data", "home", "www"] {
        std::fs::create_dir_all(at.join(folder)).expect("a folder");
    }
    let busybox = "/bin/busybox";
    std::fs::copy(busybox, at.join("bin/busybox")).expect("busybox (scripts/setup installs it)");
    let listed = finish(Command::new(busybox).arg("--list"), b"").ok();
    for name in listed.text().lines().filter(|name| *name != "busybox") {
        symlink("busybox", at.join("bin").join(name)).expect("a link");
    }
    let file = |name: &str, content: &str| std::fs::write(at.join(name), content).expect("a file");
    file("etc/passwd", "root:x:0:0:root:/:/bin/sh\nann:x:1000:1000::/home:/bin/sh\n");
    file("etc/group", "root:x:0:\nann:x:1000:\nmore:x:2000:ann\n");
    file("www/index.html", "from a pod\n");
}
