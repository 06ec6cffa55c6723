//! Pulls from a real registry server on loopback.

mod support;

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use exocell_images::{
    Credentials, Digest, ImageError, ImportLimits, Reference, RegistryOptions, Silent, Source,
};
use support::{Bench, Image, Layer, gzip};

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(folder: &Path) -> Self {
        Self::start_with(folder, "")
    }

    fn start_with(folder: &Path, more: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n{more}",
            folder.join("registry").display()
        );
        fs::File::create(folder.join("config.yml")).unwrap().write_all(config.as_bytes()).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(folder.join("config.yml"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry is missing: install the Debian package docker-registry");
        let server = Self { child, port };
        let deadline = Instant::now() + Duration::from_secs(20);
        while let Err(error) = ureq::get(server.url("")).call() {
            if matches!(error, ureq::Error::StatusCode(401)) {
                break;
            }
            assert!(Instant::now() < deadline, "docker-registry does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        server
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/v2/{path}", self.port)
    }

    fn push(&self, image: &Image, name: &str, tag: &str) {
        let manifest_digest = image.index["manifests"][0]["digest"].as_str().unwrap();
        for bytes in image.blobs.values() {
            let digest = Digest::of(bytes);
            if digest.to_string() == manifest_digest {
                continue;
            }
            let begun =
                ureq::post(self.url(&format!("{name}/blobs/uploads/"))).send_empty().unwrap();
            let location = begun.headers()["location"].to_str().unwrap().to_owned();
            ureq::put(format!("{location}&digest={digest}")).send(&bytes[..]).unwrap();
        }
        let kind = "application/vnd.oci.image.manifest.v1+json";
        ureq::put(self.url(&format!("{name}/manifests/{tag}")))
            .content_type(kind)
            .send(serde_json::to_vec(&image.manifest).unwrap())
            .unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn image() -> Image {
    let bytes = Layer::default().file("a", &[9; 100_000]).bytes();
    let mut image = Image::new(vec![(bytes.clone(), gzip(&bytes))]);
    image.manifest["mediaType"] = "application/vnd.oci.image.manifest.v1+json".into();
    image.manifest["config"]["mediaType"] = "application/vnd.oci.image.config.v1+json".into();
    image.manifest["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip".into();
    image.seal();
    image
}

fn pull(bench: &Bench, name: &str) -> Result<exocell_images::ImageRecord, ImageError> {
    let reference: Reference = name.parse().unwrap();
    let source = Source::Registry { reference, options: RegistryOptions::default() };
    bench.store.import(&source, None, &ImportLimits::default(), &mut Silent)
}

#[test]
fn images_are_pulled_by_tag_and_digest() {
    let bench = Bench::default();
    let server = Server::start(bench.folder.path());
    server.push(&image(), "some/thing", "v1");
    let name = format!("127.0.0.1:{}/some/thing", server.port);
    let record = pull(&bench, &format!("{name}:v1")).unwrap();
    assert_eq!(record.tags, [format!("{name}:v1")]);
    assert_eq!(fs::read(bench.extract(&record.erofs).join("a")).unwrap(), [9; 100_000]);
    bench.store.remove(&record.id.hex(), true).unwrap();
    let pinned = format!("{name}@{}", record.manifest.unwrap());
    assert_eq!(pull(&bench, &pinned).unwrap().id, record.id);
    for missing in [format!("{name}:v2"), format!("127.0.0.1:{}/other", server.port)] {
        let error = pull(&bench, &missing).unwrap_err();
        assert!(matches!(error, ImageError::NotInRegistry { .. }), "{error:?}");
    }
}

#[test]
fn a_blob_spoiled_at_the_registry_is_refused() {
    let bench = Bench::default();
    let server = Server::start(bench.folder.path());
    let image = image();
    server.push(&image, "x", "latest");
    let hex = image.manifest["layers"][0]["digest"].as_str().unwrap()[7..].to_owned();
    let stored =
        bench.path(&format!("registry/docker/registry/v2/blobs/sha256/{}/{hex}/data", &hex[..2]));
    let mut bytes = fs::read(&stored).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0xff;
    fs::write(&stored, bytes).unwrap();
    let error = pull(&bench, &format!("127.0.0.1:{}/x", server.port)).unwrap_err();
    assert!(
        matches!(error, ImageError::DigestMismatch { .. } | ImageError::Io { .. }),
        "{error:?}"
    );
    assert!(bench.store.list().unwrap().is_empty());
    assert_eq!(bench.leftovers(), 0);
}

#[test]
fn a_registry_that_is_not_there() {
    let bench = Bench::default();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = pull(&bench, &format!("127.0.0.1:{port}/x")).unwrap_err();
    assert!(matches!(error, ImageError::Registry { .. }), "{error:?}");
}

#[test]
fn a_login_is_made_when_the_registry_wants_one() {
    let bench = Bench::default();
    let password_file = bench.path("htpasswd");
    fs::write(
        &password_file,
        "user:$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n",
    )
    .unwrap();
    let auth =
        format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", password_file.display());
    let server = Server::start_with(bench.folder.path(), &auth);
    let name = format!("127.0.0.1:{}/x", server.port);
    let error = pull(&bench, &name).unwrap_err();
    assert!(matches!(error, ImageError::Unauthorized { .. }), "{error:?}");
    for (password, let_in) in [("wrong", false), ("secret", true)] {
        let credentials = Credentials { username: "user".into(), password: password.into() };
        let options = RegistryOptions { credentials: Some(credentials), ..Default::default() };
        let source = Source::Registry { reference: name.parse().unwrap(), options };
        let error =
            bench.store.import(&source, None, &ImportLimits::default(), &mut Silent).unwrap_err();
        assert_eq!(matches!(error, ImageError::NotInRegistry { .. }), let_in, "{error:?}");
    }
}

/// Answers one connection after the other, then says what it was asked.
fn answers(at: &str, answers: Vec<String>) -> (u16, std::thread::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind((at, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = std::thread::spawn(move || {
        let mut asked = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let count = std::io::Read::read(&mut stream, &mut request).unwrap();
            asked.push(String::from_utf8_lossy(&request[..count]).to_ascii_lowercase());
            if answer.is_empty() {
                break;
            }
            let head = answer.replace("PORT", &port.to_string());
            stream
                .write_all(format!("HTTP/1.1 {head}Connection: close\r\n\r\n").as_bytes())
                .unwrap();
        }
        asked
    });
    (port, asked)
}

fn end(port: u16, at: &str) {
    let mut stream = std::net::TcpStream::connect((at, port)).unwrap();
    stream.write_all(b"end").unwrap();
}

fn pull_as(name: &str, login_hosts: &[&str]) -> ImageError {
    let credentials = Credentials { username: "operator".into(), password: "s3cret".into() };
    let options = RegistryOptions {
        credentials: Some(credentials),
        login_hosts: login_hosts.iter().map(|host| (*host).to_owned()).collect(),
        ..Default::default()
    };
    let source = Source::Registry { reference: name.parse().unwrap(), options };
    let store = Bench::default();
    store.store.import(&source, None, &ImportLimits::default(), &mut Silent).unwrap_err()
}

/// Whoever a registry sends us to is told no password and no token, whatever it asks for.
#[test]
fn who_a_registry_redirects_to_gets_no_credentials() {
    for challenge in ["Bearer realm=\"http://127.0.0.2:PORT/token\"", "Basic realm=\"x\""] {
        let wants = format!("401 x\r\nWWW-Authenticate: {challenge}\r\nContent-Length: 0\r\n");
        let (foreign, asked) = answers("127.0.0.2", vec![wants, String::new()]);
        let location = format!("http://127.0.0.2:{foreign}/blob");
        let redirect = format!("307 x\r\nLocation: {location}\r\nContent-Length: 0\r\n");
        let (port, own_asked) = answers(
            "127.0.0.1",
            vec![
                "401 x\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n".to_owned(),
                redirect,
                String::new(),
            ],
        );
        let error = pull_as(&format!("127.0.0.1:{port}/x"), &[]);
        assert!(matches!(error, ImageError::Unauthorized { .. }), "{error:?}");
        assert!(error.to_string().contains("where it sends us"), "{error}");
        end(port, "127.0.0.1");
        end(foreign, "127.0.0.2");
        let own_asked = own_asked.join().unwrap();
        assert!(own_asked[1].contains("authorization: basic b3bl"), "{own_asked:?}");
        assert_eq!(own_asked[2], "end", "nothing more is asked of the registry");
        let asked = asked.join().unwrap();
        assert!(!asked[0].contains("authorization"), "{asked:?}");
        assert_eq!(asked[1], "end", "no login is tried there");
    }
}

/// A registry's own word sends a password to no host that is not its own or named by the operator.
#[test]
fn a_login_server_elsewhere_gets_no_password_unless_it_is_named() {
    let (login, asked) = answers("127.0.0.2", vec!["403 x\r\nContent-Length: 0\r\n".to_owned()]);
    for (named, told) in [(&[][..], "is another's"), (&["127.0.0.2"][..], "answers 403")] {
        let realm = format!("Bearer realm=\"http://127.0.0.2:{login}/token\"");
        let wants = format!("401 x\r\nWWW-Authenticate: {realm}\r\nContent-Length: 0\r\n");
        let (port, _) = answers("127.0.0.1", vec![wants]);
        let error = pull_as(&format!("127.0.0.1:{port}/x"), named);
        assert!(matches!(error, ImageError::Unauthorized { .. }), "{error:?}");
        assert!(error.to_string().contains(told), "{error}");
    }
    let asked = asked.join().unwrap();
    assert!(asked[0].contains("authorization: basic b3bl"), "{asked:?}");
}

/// A registry that wants a token answers with the requests it was sent.
#[test]
fn a_token_is_fetched_for_the_repository() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let challenge = format!("Bearer realm=\"http://127.0.0.1:{port}/token\",service=\"s\"");
        let answers = [
            format!(
                "HTTP/1.1 401 x\r\nWWW-Authenticate: {challenge}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            ),
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 15\r\n\r\n{\"token\":\"tok\"}"
                .into(),
            "HTTP/1.1 404 x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".into(),
        ];
        answers.map(|answer| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let count = std::io::Read::read(&mut stream, &mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8_lossy(&request[..count]).to_ascii_lowercase()
        })
    });
    let error = pull(&Bench::default(), &format!("127.0.0.1:{port}/x")).unwrap_err();
    assert!(matches!(error, ImageError::NotInRegistry { .. }), "{error:?}");
    let [_, token, last] = server.join().unwrap();
    assert!(
        token.starts_with("get /token?") && token.contains("pull") && token.contains("service=s"),
        "{token}"
    );
    assert!(last.contains("authorization: bearer tok"), "{last}");
}
