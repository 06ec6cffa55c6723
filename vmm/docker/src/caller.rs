//! Who makes a call: the operator, whose socket it came by, or a cell that was given that socket.
//!
//! A cell may have containers made that have at most its own rights, and do with those what it
//! likes. Of all others it may end and remove what it finds, as Docker's clients tidy up, and learn
//! that they are there. Which calls there are for it is in [`crate::policy`].

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use exocell_cell::granted::Location;
use exocell_cell::network::{Publish, covers};
use exocell_cell::xgate::{CapabilitySet, CapsError, Endpoint, NetworkScope, Rights};
use serde_json::{Value, json};

use crate::admit::{Defaults, MountPoint};
use crate::containers::Container;
use crate::error::{ApiError, ApiResult, refused};
use crate::inside::Inside;

/// Containers that one cell has had made, directly or by those, at once.
pub const CONTAINERS_MAX: usize = 64;

/// See the module's head.
#[derive(Debug, Clone, Default)]
pub struct Caller(Option<Arc<Cell>>);

/// A cell that calls, with what it may have now.
#[derive(Debug)]
pub struct Cell {
    /// Those that had it made, the first of them first, and its own.
    pub line: Vec<String>,
    pub name: String,
    pub caps: CapabilitySet,
    pub folders: Vec<Own>,
    /// The networks between cells that it is in.
    pub networks: Vec<String>,
    /// Who is asked for names, if the operator named somebody.
    pub dns: Vec<IpAddr>,
    pub labels: BTreeMap<String, String>,
    /// Its own published ports.
    pub publish: Vec<Publish>,
    /// What it may have in the guest that it is in.
    pub inside: Inside,
}

/// A folder, file or socket of the host that a cell has.
#[derive(Debug, Clone)]
pub struct Own {
    /// As its table names it.
    pub host: PathBuf,
    /// Where it is: no part is a link.
    pub real: PathBuf,
    pub rights: Rights,
    pub is_socket: bool,
}

impl Caller {
    pub fn of_cell(cell: Cell) -> Self {
        Self(Some(Arc::new(cell)))
    }

    /// The cell, if it is one.
    pub fn cell(&self) -> Option<&Cell> {
        self.0.as_deref()
    }

    /// Who has made what it has made, for whoever asks later; the operator is not noted.
    pub fn line(&self) -> Vec<String> {
        self.cell().map_or_else(Vec::new, |cell| cell.line.clone())
    }

    /// Whether it has made what `line` has made, or is the last of it.
    pub fn has_made(&self, line: &[String]) -> bool {
        self.cell().is_none_or(|cell| line.iter().any(|id| id == cell.id()))
    }

    /// Whether it may remove a volume or network that `line` has made and that has these `labels`:
    /// what is its own, and what is of its session, as of a program that tidies up after tests.
    pub fn tidies(&self, line: &[String], labels: &BTreeMap<String, String>) -> bool {
        self.has_made(line) || self.cell().is_some_and(|cell| cell.is_of_session(labels))
    }

    /// Whether it may do with a container what it likes.
    pub fn owns(&self, container: &Container) -> bool {
        self.has_made(&container.made_by)
            || self.cell().is_some_and(|cell| cell.id() == container.id())
    }

    /// # Errors
    /// 403 for a container that it may not look into.
    pub fn check_owns(&self, container: &Container) -> ApiResult<()> {
        match self.owns(container) {
            true => Ok(()),
            false => Err(refused(format!(
                "the container {} was not made by this cell, which may look into those that it \
                 has made, and only end and remove others",
                container.name()
            ))),
        }
    }

    /// What a container gets where the call says nothing.
    pub fn defaults(&self, own: &Defaults) -> Defaults {
        let Some(cell) = self.cell() else { return own.clone() };
        let least = |own: u64, most: Option<u64>| most.map_or(own, |most| own.min(most));
        let count = |own: u32, most: Option<u32>| most.map_or(own, |most| own.min(most));
        let caps = &cell.caps;
        let connect = caps.network().map(|network| &network.connect);
        Defaults {
            memory_bytes: least(own.memory_bytes, caps.memory_bytes()),
            disk_bytes: least(own.disk_bytes, caps.disk_bytes()),
            vcpus: own.vcpus.min(caps.vcpus()),
            processes: count(own.processes, caps.process_max()),
            intra: own.intra,
            connect: connect.into_iter().flatten().map(ToString::to_string).collect(),
        }
    }
}

/// Whether what a label with this name says is whose session something is of, as
/// `org.testcontainers.sessionId` does.
fn is_of_sessions(label: &str) -> bool {
    label.to_ascii_lowercase().contains("session")
}

impl Cell {
    /// Whether something with these labels is of the session that the cell is of.
    fn is_of_session(&self, labels: &BTreeMap<String, String>) -> bool {
        let own =
            self.labels.iter().filter(|(name, value)| is_of_sessions(name) && !value.is_empty());
        own.into_iter().any(|(name, value)| labels.get(name) == Some(value))
    }

    pub fn id(&self) -> &str {
        self.line.last().map_or("", String::as_str)
    }

    /// The table of a new container, of which `weighs` says whether its client named the share of
    /// the processors, cut to what this cell has and nobody can name. Its folders and networks are
    /// held against what is there apart ([`Self::check_places`]).
    ///
    /// # Errors
    /// 403 for what is more than the cell has.
    pub fn bounded(&self, table: &str, weighs: bool, networks: &[String]) -> ApiResult<String> {
        let broken = |error: String| ApiError::internal(format!("the table: {error}"));
        let mut table: Value = serde_json::from_str(table).map_err(|e| broken(e.to_string()))?;
        for (name, has) in [
            ("clock", self.caps.clock()),
            ("random", self.caps.random()),
            ("stdio", self.caps.stdio()),
            ("disk", self.caps.disk_bytes().is_some()),
        ] {
            if let (false, Some(sections)) = (has, table.as_object_mut()) {
                sections.remove(name);
            }
        }
        if !weighs {
            let weight = table["cpu"]["weight"].as_u64().unwrap_or(100);
            table["cpu"]["weight"] = weight.min(self.caps.cpu_weight().into()).into();
        }
        if let (Some(own), true) = (self.caps.network(), table["network"].is_object()) {
            bound_network(&mut table["network"], own);
        }
        let wish = self.within(&table, networks)?;
        if let Some(deadline) = wish.deadline() {
            table["time"] = json!({ "deadline": format!("{}ms", deadline.as_millis()) });
        }
        Ok(table.to_string())
    }

    /// Whether the amounts and rules of `table` are within the cell's own; `networks` are those
    /// that it may have others join.
    fn within(&self, table: &Value, networks: &[String]) -> ApiResult<CapabilitySet> {
        let mut wish = table.clone();
        wish["folder"] = json!([]);
        if let Some(Value::Array(join)) = wish.pointer_mut("/network/join") {
            join.retain(|name| !networks.iter().any(|own| name == own.as_str()));
        }
        let says = |field: &str| wish["network"][field].as_array().is_some_and(|l| !l.is_empty());
        if !["connect", "listen", "resolve", "join"].into_iter().any(says)
            && let Some(sections) = wish.as_object_mut()
        {
            sections.remove("network");
        }
        let wish = CapabilitySet::parse(&wish.to_string(), Path::new("/"));
        let within = wish.and_then(|wish| wish.within(&self.caps));
        let within = within.map_err(|error| match error {
            CapsError::Beyond { capability, asked, granted } => refused(format!(
                "a container that a cell makes has at most the cell's own rights: {asked} is asked \
                 for, and the cell {} has {granted} ({capability})",
                self.name
            )),
            error => ApiError::bad_request(error.to_string()),
        })?;
        let own = self.caps.network().map_or(&[][..], |own| &own.connect);
        let connect = within.network().map_or(&[][..], |wish| &wish.connect);
        let is_own = |rule: &&Endpoint| {
            own.iter().any(|own| own.contains(rule) && covers(&own.host, &rule.host))
        };
        match connect.iter().find(|rule| !is_own(rule)) {
            Some(rule) => Err(refused(format!(
                "{rule} is the host's, its link or its cloud's, and no rule of the cell {} names it",
                self.name
            ))),
            None => Ok(within),
        }
    }

    /// Whether a container of its own may be reached at these ports of the host: at those that the
    /// cell has published itself, and on loopback at ports that the host chooses. Any other would
    /// show the host to others, or take a port that a program of the host's is to have.
    ///
    /// # Errors
    /// 403 for another.
    pub fn check_publish(&self, publish: &[Publish]) -> ApiResult<()> {
        let is_left = |wish: &Publish| {
            let is_any = wish.is_any || wish.host.port() == 0;
            wish.host.ip().to_canonical().is_loopback() && is_any && wish.within.is_none()
        };
        let is_own = |wish: &Publish| {
            self.publish.iter().any(|own| {
                let family = own.host.is_ipv4() == wish.host.is_ipv4();
                let at =
                    own.host.ip() == wish.host.ip() || own.host.ip().is_unspecified() && family;
                let same = (own.host.port(), own.is_udp) == (wish.host.port(), wish.is_udp);
                at && same && wish.host.port() != 0 && wish.within.is_none()
            })
        };
        match publish.iter().find(|wish| !is_left(wish) && !is_own(wish)) {
            None => Ok(()),
            Some(wish) => Err(refused(format!(
                "a container that a cell makes is published on the host's loopback at a port that \
                 the host chooses, or where the cell {} is published itself, and not at {}{}; leave \
                 out the host's port",
                self.name,
                wish.host,
                wish.within.map_or_else(String::new, |(first, last)| format!(" ({first}-{last})")),
            ))),
        }
    }

    /// Whether limits of a container of its own may become those of `table`.
    ///
    /// # Errors
    /// 403 for what is more than the cell has.
    pub fn check_limits(&self, table: &str) -> ApiResult<()> {
        let table: Value = serde_json::from_str(table).unwrap_or_default();
        let limits = ["version", "memory", "cpu", "disk", "processes"];
        let all = table.as_object().cloned().unwrap_or_default();
        let own = all.into_iter().filter(|(name, _)| limits.contains(&name.as_str()));
        self.within(&Value::Object(own.collect()), &[]).map(drop)
    }

    /// Whether a container of its own may start with `table`, of which networks that it may have
    /// others join are `networks`: rights that the cell has lost since are gone.
    ///
    /// # Errors
    /// 403 for what is more than the cell has.
    pub fn check_table(&self, table: &str, networks: &[String]) -> ApiResult<()> {
        let table: Value = serde_json::from_str(table).unwrap_or_default();
        self.within(&table, networks).map(drop)
    }

    /// Whether it has the volume at `path`, with the right to write if that is wanted.
    pub fn has_volume(&self, path: &Path, writable: bool) -> bool {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut own = self.folders.iter().filter(|own| own.real == real);
        own.any(|own| !writable || own.rights.contains(Rights::WRITE))
    }

    /// Whether what a container is to have of the host is called as what lies in what this cell has.
    /// Nothing is looked at: what is there, and what not, is not for the cell to learn. Where it
    /// leads is looked at later ([`Self::check_places`]).
    ///
    /// # Errors
    /// 403 for what is not.
    pub fn check_names(&self, mounts: &[MountPoint]) -> ApiResult<()> {
        let is_own = |mount: &MountPoint| {
            let source = plain(&mount.source);
            let mut own = self.folders.iter();
            own.any(|own| source.starts_with(&own.host) || source.starts_with(&own.real))
        };
        let mut binds = mounts.iter().filter(|mount| mount.volume.is_none());
        binds.find(|mount| !is_own(mount)).map_or(Ok(()), |mount| Err(self.has_none(&mount.source)))
    }

    fn has_none(&self, source: &Path) -> ApiError {
        refused(format!(
            "{} is neither a folder, file or socket of the host that the cell {} has, nor within \
             one",
            source.display(),
            self.name
        ))
    }

    /// Whether what a container has of the host, which was found at `locations`, lies in what this
    /// cell has. Volumes are looked at apart.
    ///
    /// # Errors
    /// 403 for what does not.
    pub fn check_places(&self, mounts: &[MountPoint], locations: &[Location]) -> ApiResult<()> {
        if mounts.len() != locations.len() {
            return Err(ApiError::internal("not all folders of the container were found"));
        }
        let binds = mounts.iter().zip(locations).filter(|(mount, _)| mount.volume.is_none());
        binds.into_iter().try_for_each(|(mount, location)| self.check_place(mount, location))
    }

    fn check_place(&self, mount: &MountPoint, location: &Location) -> ApiResult<()> {
        let around = |own: &&Own| match location.is_socket() || own.is_socket {
            true => own.is_socket && location.is_socket() && own.real == location.real(),
            false => location.real().starts_with(&own.real),
        };
        let found = self.folders.iter().filter(around);
        // One that lies in another has rights of its own.
        let own = found.max_by_key(|own| own.real.components().count());
        let at = mount.source.display();
        match own {
            None => Err(self.has_none(&mount.source)),
            Some(own)
                if mount.writable && !own.is_socket && !own.rights.contains(Rights::WRITE) =>
            {
                Err(refused(format!(
                    "the cell {} may read {at} and not write it; mount it read-only (:ro)",
                    self.name
                )))
            }
            Some(_) => Ok(()),
        }
    }
}

/// A path without `.` and `..`, by its letters alone.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

/// Limits of a network that nobody can name are the cell's.
fn bound_network(network: &mut Value, own: &NetworkScope) {
    if let Some(connections) = own.connections_max {
        network["connections"] = connections.into();
    }
    if let Some(rate) = own.rate_bytes {
        network["rate"] = rate.to_string().into();
    }
}

#[cfg(test)]
mod tests {
    use hyper::StatusCode;

    use super::*;

    fn cell(table: Value) -> Cell {
        let caps = CapabilitySet::parse(&table.to_string(), Path::new("/")).unwrap();
        let (name, folders, networks) = ("runner".to_owned(), Vec::new(), Vec::new());
        let (line, labels) = (vec!["a".repeat(64)], BTreeMap::new());
        let (dns, publish, inside) = (Vec::new(), Vec::new(), Inside::default());
        Cell { line, name, caps, folders, networks, dns, labels, publish, inside }
    }

    fn own() -> Value {
        json!({
            "version": 1, "memory": { "limit": "256M" }, "cpu": { "count": 2, "weight": 50 },
            "disk": { "size": "1G" }, "processes": { "max": 100 }, "stdio": {},
            "network": { "connect": ["a.org:443"], "listen": ["80"], "connections": 8 },
            "time": { "deadline": "10m" },
        })
    }

    fn wish(changes: Value) -> String {
        let mut wish = json!({
            "version": 1, "memory": { "limit": "128M" }, "cpu": { "count": 1, "weight": 100 },
            "disk": { "size": "1G" }, "processes": { "max": 100 },
            "clock": {}, "random": {}, "stdio": {}, "folder": [],
        });
        for (name, value) in changes.as_object().unwrap() {
            wish[name] = value.clone();
        }
        wish.to_string()
    }

    #[test]
    fn a_container_has_at_most_what_its_cell_has() {
        let cell = cell(own());
        let bounded = |changes: Value| cell.bounded(&wish(changes), false, &[]);
        let table: Value = serde_json::from_str(&bounded(json!({})).unwrap()).unwrap();
        assert_eq!(table["cpu"]["weight"], 50);
        assert!(table.get("clock").is_none() && table.get("random").is_none());
        let caps = CapabilitySet::parse(&table.to_string(), Path::new("/")).unwrap();
        assert_eq!(caps.deadline(), Some(std::time::Duration::from_secs(600)));
        for (changes, word) in [
            (json!({ "memory": { "limit": "257M" } }), "memory"),
            (json!({ "cpu": { "count": 3, "weight": 50 } }), "cpu"),
            (json!({ "disk": { "size": "2G" } }), "disk"),
            (json!({ "processes": { "max": 101 } }), "process"),
            (json!({ "network": { "connect": ["b.org:443"] } }), "b.org"),
            (json!({ "network": { "connect": ["a.org:443", "a.org:80"] } }), "network"),
            (json!({ "network": { "listen": ["81"] } }), "81"),
            (json!({ "network": { "join": ["others"] } }), "others"),
        ] {
            let error = bounded(changes.clone()).unwrap_err();
            assert_eq!(error.status, StatusCode::FORBIDDEN, "{changes}");
            assert!(error.message.contains(word), "{changes}: {}", error.message);
            assert!(error.message.contains("runner"), "{}", error.message);
        }
        let network = json!({ "network": { "connect": ["a.org:443"], "listen": ["80"] } });
        let table: Value = serde_json::from_str(&bounded(network).unwrap()).unwrap();
        assert_eq!(table["network"]["connections"], 8);
        let joins = wish(json!({ "network": { "join": ["own"] } }));
        cell.bounded(&joins, false, &["own".to_owned()]).unwrap();
        // Whoever names a share is told that it is too much.
        assert!(cell.bounded(&wish(json!({})), true, &[]).is_err());
    }

    #[test]
    fn a_wide_rule_is_not_narrowed_to_the_host() {
        let mut all = own();
        all["network"] = json!({ "connect": ["0.0.0.0/0:80", "127.0.0.2:81"] });
        let cell = cell(all);
        let bounded = |rule: &str| {
            let network = json!({ "network": { "connect": [rule] } });
            cell.bounded(&wish(network), false, &[])
        };
        for rule in ["93.184.216.34:80", "127.0.0.2:81", "0.0.0.0/0:80"] {
            assert!(bounded(rule).is_ok(), "{rule}");
        }
        for rule in ["127.0.0.1:80", "169.254.169.254:80", "127.0.0.0/8:80"] {
            assert_eq!(bounded(rule).unwrap_err().status, StatusCode::FORBIDDEN, "{rule}");
        }
    }

    #[test]
    fn ports_are_the_hosts_choice_or_the_cells_own() {
        let publish = |at: &str| Publish::new(at.parse().unwrap(), 80);
        let ports = vec![publish("127.0.0.1:18080"), publish("0.0.0.0:9000")];
        let cell = Cell { publish: ports, ..cell(own()) };
        let numbered = Publish { is_any: true, ..publish("127.0.0.1:40000") };
        let last = publish("127.0.0.1:18080");
        for fits in [publish("127.0.0.1:0"), publish("[::1]:0"), numbered, last] {
            cell.check_publish(&[fits]).unwrap();
        }
        cell.check_publish(&[publish("192.0.2.1:9000"), publish("0.0.0.0:9000")]).unwrap();
        for (at, is_udp) in [
            ("0.0.0.0:0", false),
            ("[::]:0", false),
            ("192.0.2.1:0", false),
            ("127.0.0.1:443", false),
            ("0.0.0.0:18080", false),
            ("127.0.0.1:18080", true),
            ("[::]:2222", false),
        ] {
            let wish = [publish("127.0.0.1:0"), publish(at).by_udp(is_udp)];
            let refused = cell.check_publish(&wish).unwrap_err();
            assert_eq!(refused.status, StatusCode::FORBIDDEN, "{at}");
            assert!(refused.message.contains(at), "{}", refused.message);
        }
        let range = publish("127.0.0.1:0").within((8000, 8010));
        cell.check_publish(&[range]).unwrap_err();
    }

    #[test]
    fn paths_of_the_host_are_held_against_the_cells_by_their_letters() {
        let of = |host: &str, real: &str| Own {
            host: host.into(),
            real: real.into(),
            rights: Rights::READ,
            is_socket: false,
        };
        let folders = vec![of("/srv/a", "/srv/a"), of("/var/run/b", "/run/b")];
        let cell = Cell { folders, ..cell(own()) };
        let check = |path: &str| {
            let mount = MountPoint { source: path.into(), ..MountPoint::default() };
            cell.check_names(&[mount])
        };
        for path in ["/srv/a", "/srv/a/./b", "/srv/x/../a", "/var/run/b/c", "/run/b"] {
            check(path).unwrap();
        }
        for path in ["/", "/etc/shadow", "/srv/ab", "/srv/a/../b", "/srv/a/../../etc", "/run"] {
            assert_eq!(check(path).unwrap_err().status, StatusCode::FORBIDDEN, "{path}");
        }
    }

    #[test]
    fn limits_change_within_what_the_cell_has() {
        let cell = cell(own());
        cell.check_limits(&wish(json!({ "cpu": { "count": 1, "weight": 50 } }))).unwrap();
        let more =
            wish(json!({ "memory": { "limit": "1G" }, "cpu": { "count": 1, "weight": 50 } }));
        assert_eq!(cell.check_limits(&more).unwrap_err().status, StatusCode::FORBIDDEN);
    }

    #[test]
    fn defaults_are_at_most_the_cells() {
        let server = Defaults {
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 20,
            vcpus: 8,
            processes: 4096,
            intra: exocell_cell::intra::Intra::default(),
            connect: vec!["*:443".to_owned()],
        };
        assert_eq!(Caller::default().defaults(&server), server);
        let caller = Caller::of_cell(cell(own()));
        let least = caller.defaults(&server);
        assert_eq!((least.memory_bytes, least.disk_bytes), (256 << 20, 1 << 20));
        assert_eq!((least.vcpus, least.processes), (2, 100));
        assert_eq!(least.connect, ["a.org:443"]);
    }

    #[test]
    fn a_cell_owns_what_it_and_its_containers_have_made() {
        let caller = Caller::of_cell(cell(own()));
        let [id, other] = ["a".repeat(64), "b".repeat(64)];
        assert!(
            caller.has_made(std::slice::from_ref(&id)) && caller.has_made(&[id, other.clone()])
        );
        assert!(!caller.has_made(&[other]) && !caller.has_made(&[]));
        assert!(Caller::default().has_made(&[]));
    }

    #[test]
    fn a_cell_tidies_up_what_is_of_its_session() {
        let labels = |all: &[(&str, &str)]| -> BTreeMap<String, String> {
            all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let of =
            |all: &[(&str, &str)]| Caller::of_cell(Cell { labels: labels(all), ..cell(own()) });
        let session = ("org.testcontainers.sessionId", "1");
        let ryuk = of(&[session, ("org.testcontainers", "true"), ("empty.session", "")]);
        assert!(ryuk.tidies(&[], &labels(&[session])));
        for others in [
            labels(&[]),
            labels(&[("org.testcontainers.sessionId", "2")]),
            labels(&[("org.testcontainers", "true")]),
            labels(&[("empty.session", "")]),
        ] {
            assert!(!ryuk.tidies(&[], &others), "{others:?}");
            assert!(
                ryuk.tidies(&["a".repeat(64)], &others) && Caller::default().tidies(&[], &others)
            );
        }
    }
}
