//! The servers, each at a socket of its own in a folder that goes with them.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::certificates::Certificates;
use super::{NAME, web};

const PROGRAMS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/servers/programs");
/// An answer that does not come is a failure.
const PATIENCE: Duration = Duration::from_secs(30);

/// Servers that run, by their names.
pub struct Fleet {
    servers: Vec<(&'static str, PathBuf)>,
    children: Vec<Child>,
    folder: TempDir,
}

/// The hosts that an answer says were asked for.
pub fn served(answer: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(answer).into_owned();
    let parts = text.split("[[").skip(1);
    parts.map(|part| part.split("]]").next().unwrap_or_default().to_owned()).collect()
}

/// Whether a server took this for the granted host.
pub fn is_granted(host: &str) -> bool {
    host == NAME || host.strip_prefix(NAME).is_some_and(|port| port == ":80")
}

impl Fleet {
    fn new() -> Self {
        Self { servers: Vec::new(), children: Vec::new(), folder: TempDir::new().unwrap() }
    }

    /// Everything that speaks HTTP.
    pub fn of_http() -> Self {
        let mut fleet = Self::new();
        let hyper = fleet.socket("hyper");
        web::serve(UnixListener::bind(hyper).unwrap());
        fleet.nginx("listen unix:SOCKET");
        fleet.haproxy("");
        fleet.python("web.py", "python3");
        fleet.python("h11web.py", "/usr/bin/python3");
        fleet.gunicorn();
        fleet.go("");
        fleet.wait();
        fleet
    }

    /// Everything that speaks TLS, and answers with the certificate of the name asked for.
    pub fn of_tls(certificates: &Certificates) -> Self {
        let mut fleet = Self::new();
        let tls = "listen unix:SOCKET ssl; ssl_protocols TLSv1.2 TLSv1.3; \
                   ssl_certificate DIR/WHICH.pem; ssl_certificate_key DIR/WHICH.pem";
        let dir = certificates.folder().display().to_string();
        fleet.nginx(&tls.replace("DIR", &dir));
        fleet.haproxy(&format!("ssl crt {dir}/other.pem crt {dir}/granted.pem"));
        fleet.openssl(&dir, &[]);
        fleet.go(&dir);
        fleet.python_over_tls(&dir);
        fleet.wait();
        fleet
    }

    /// OpenSSL's server, which wants another hello of who begins with X25519.
    pub fn that_asks_again(certificates: &Certificates) -> Self {
        let mut fleet = Self::new();
        let dir = certificates.folder().display().to_string();
        fleet.openssl(&dir, &["-groups", "P-384"]);
        fleet.wait();
        fleet
    }

    pub fn len(&self) -> usize {
        self.servers.len()
    }

    pub fn servers(&self) -> &[(&'static str, PathBuf)] {
        &self.servers
    }

    /// What each server answers to `said`, after which nothing comes.
    pub fn ask(&self, said: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
        std::thread::scope(|scope| {
            let asking: Vec<_> = self
                .servers
                .iter()
                .map(|(name, socket)| (*name, scope.spawn(move || ask(name, socket, said))))
                .collect();
            asking.into_iter().map(|(name, asked)| (name, asked.join().unwrap())).collect()
        })
    }

    fn socket(&mut self, name: &'static str) -> PathBuf {
        let socket = self.folder.path().join(name);
        self.servers.push((name, socket.clone()));
        socket
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn run(&mut self, command: &mut Command) {
        let log = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(self.folder.path().join("log"))
            .unwrap();
        // It ends with the test, however that ends.
        let mut bound = Command::new("setpriv");
        bound.args(["--pdeathsig", "TERM", "--"]).arg(command.get_program());
        bound.args(command.get_args()).current_dir(self.folder.path());
        let child = bound.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log).spawn();
        self.children.push(child.expect("setpriv is part of util-linux"));
    }

    fn nginx(&mut self, listen: &str) {
        let socket = self.socket("nginx").display().to_string();
        let listen = listen.replace("SOCKET", &socket);
        let server = |which: &str, first: &str, name: &str| {
            let listen = listen.replace("WHICH", which);
            let listen = listen.replacen(&socket, &format!("{socket} {first}"), 1);
            format!("server {{ {listen}; server_name {name}; return 200 \"[[$host]]\\n\"; }}")
        };
        let servers =
            [server("other", "default_server", "_"), server("granted", "", NAME)].join("\n");
        let config = format!(
            "daemon off; worker_processes 1; pid nginx.pid; error_log stderr crit;\n\
             events {{ worker_connections 512; }}\n\
             http {{ access_log off; client_body_temp_path body; proxy_temp_path proxy;\n\
             fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;\n{servers} }}"
        );
        let path = self.file("nginx.conf", &config);
        let folder = self.folder.path().to_owned();
        self.run(Command::new("/usr/sbin/nginx").arg("-p").arg(folder).arg("-c").arg(path));
    }

    fn haproxy(&mut self, tls: &str) {
        let socket = self.socket("haproxy").display().to_string();
        let config = format!(
            "defaults\n mode http\n timeout client 20s\n timeout server 20s\n timeout connect 5s\n\
             frontend all\n bind unix@{socket} {tls}\n \
             http-request return status 200 content-type text/plain \
             lf-string \"[[%[req.hdr(host)]]]\\n\"\n"
        );
        let path = self.file("haproxy.cfg", &config);
        self.run(Command::new("/usr/sbin/haproxy").arg("-db").arg("-f").arg(path));
    }

    fn python(&mut self, program: &'static str, interpreter: &str) {
        let socket = self.socket(program);
        self.run(Command::new(interpreter).arg(format!("{PROGRAMS}/{program}")).arg(socket));
    }

    fn gunicorn(&mut self) {
        let bind = format!("unix:{}", self.socket("gunicorn").display());
        let with = ["-k", "gthread", "--threads", "4", "--keep-alive", "5", "--chdir", PROGRAMS];
        let mut command = Command::new("/usr/bin/gunicorn");
        self.run(command.args(with).args(["-b", &bind, "app:serve"]));
    }

    fn openssl(&mut self, dir: &str, more: &[&str]) {
        let socket = self.socket("openssl");
        let file = |which: &str| format!("{dir}/{which}.pem");
        let (other, granted) = (file("other"), file("granted"));
        let with = ["s_server", "-quiet", "-www", "-cert", &other, "-key", &other];
        let named = ["-servername", NAME, "-cert2", &granted, "-key2", &granted];
        let mut command = Command::new("openssl");
        self.run(command.args(with).args(named).args(more).arg("-unix").arg(socket));
    }

    fn python_over_tls(&mut self, dir: &str) {
        let socket = self.socket("python");
        let program = format!("{PROGRAMS}/tls.py");
        self.run(Command::new("python3").arg(program).arg(socket).arg(dir));
    }

    /// Go's server, where there is a Go to build it.
    fn go(&mut self, dir: &str) {
        let binary = self.folder.path().join("goweb");
        let source = format!("{PROGRAMS}/web.go");
        let mut build = Command::new("go");
        build.arg("build").arg("-o").arg(&binary).arg(source).env("GO111MODULE", "off");
        match build.status() {
            Ok(status) => assert!(status.success(), "go build"),
            Err(_) => return eprintln!("no go here: its server is left out"),
        }
        let socket = self.socket("go");
        self.run(Command::new(binary).arg(socket).arg(dir));
    }

    /// Waits until each listens.
    fn wait(&self) {
        for (name, socket) in &self.servers {
            let is_there = (0..3000).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                UnixStream::connect(socket).is_ok()
            });
            let log = || std::fs::read_to_string(self.folder.path().join("log"));
            assert!(is_there, "{name}, which scripts/setup installs, does not listen: {:?}", log());
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for child in &mut self.children {
            // It may have ended; nginx's and gunicorn's workers end with it only if asked.
            let pid = nix::unistd::Pid::from_raw(child.id() as i32);
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM);
            let _ = child.wait();
        }
    }
}

fn ask(name: &str, socket: &Path, said: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).unwrap_or_else(|error| panic!("{name}: {error}"));
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // One that has heard enough answers nonetheless.
    let _ = stream.write_all(said);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            panic!("{name} does not end: {}", said.escape_ascii())
        }
        // A reset ends an answer too.
        Ok(_) | Err(_) => answer,
    }
}
