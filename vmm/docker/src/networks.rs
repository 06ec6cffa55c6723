//! The calls on networks, and which networks a container is in.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::clock::{NEVER, rfc3339_ms};
use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::network::mac_address;
use exocell_cell::networks::{Attachment, Network, Networks, Wanted};
use exocell_cell::switch::Subnet;
use exocell_cell::xgate::CapabilitySet;
use exocell_cell::{CellError, Layout, switches};
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::admit;
use crate::caller::Caller;
use crate::containers::{Container, Containers, Seen};
use crate::error::{ApiError, ApiResult, refused};
use crate::events::Event;
use crate::fields;
use crate::filters::Filters;
use crate::http::{Call, Response, empty, json as reply};
use crate::ports;
use crate::state::Server;
use crate::wire::{Create, Endpoint, or_default};
use crate::{shares, starts};

/// What is there without being made: what the server grants a container of its own, and nothing.
pub const BUILT_IN: [&str; 2] = ["bridge", "none"];
const FILTERS: [&str; 7] = ["dangling", "driver", "id", "label", "name", "scope", "type"];

/// How often, and how soon, it is looked whether a cell's supervisor has let go of its record.
const RELEASE_LOOKS: u32 = 40;
const RELEASE_LOOK: Duration = Duration::from_millis(50);

/// The body of `POST /networks/create`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct NetworkCreate {
    #[serde(deserialize_with = "or_default")]
    name: String,
    #[serde(deserialize_with = "or_default")]
    driver: String,
    #[serde(deserialize_with = "or_default")]
    scope: String,
    #[serde(deserialize_with = "or_default")]
    internal: bool,
    #[serde(deserialize_with = "or_default")]
    attachable: bool,
    #[serde(rename = "IPAM", deserialize_with = "or_default")]
    ipam: Ipam,
    #[serde(deserialize_with = "or_default")]
    options: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    labels: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Ipam {
    #[serde(deserialize_with = "or_default")]
    driver: String,
    #[serde(deserialize_with = "or_default")]
    config: Vec<IpamConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct IpamConfig {
    #[serde(deserialize_with = "or_default")]
    subnet: String,
    #[serde(rename = "IPRange", deserialize_with = "or_default")]
    ip_range: String,
    #[serde(deserialize_with = "or_default")]
    gateway: String,
    #[serde(deserialize_with = "or_default")]
    auxiliary_addresses: BTreeMap<String, String>,
}

/// The body of `POST /networks/{id}/connect` and `disconnect`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Connect {
    #[serde(deserialize_with = "or_default")]
    container: String,
    #[serde(deserialize_with = "or_default")]
    endpoint_config: Endpoint,
}

fn bad(message: String) -> ApiError {
    ApiError::bad_request(message)
}

/// The text as what it is to be; `None` where it is empty.
fn parsed<T: std::str::FromStr>(text: &str, what: &str) -> ApiResult<Option<T>> {
    match text.is_empty() {
        true => Ok(None),
        false => text.parse().map(Some).map_err(|_| bad(format!("invalid {what}: {text:?}"))),
    }
}

impl NetworkCreate {
    fn wanted(self) -> ApiResult<Wanted> {
        if !matches!(self.driver.as_str(), "" | "default" | "bridge") {
            return Err(ApiError::not_found(format!(
                "could not find plugin {} in v1 plugin registry: networks between cells are of one \
                 kind, bridge",
                self.driver
            )));
        }
        if !matches!(self.scope.as_str(), "" | "local") || !self.ipam.is_default() {
            return Err(ApiError::unsupported("this scope or driver of addresses", "leave it out"));
        }
        let mut configs = self.ipam.config.into_iter().filter(|own| !own.is_empty());
        let own = configs.next().unwrap_or_default();
        if configs.next().is_some() || own.subnet.contains("::") {
            return Err(ApiError::unsupported(
                "more than one subnet, or one of IPv6",
                "name one subnet of IPv4",
            ));
        }
        Ok(Wanted {
            name: self.name,
            subnet: parsed::<Subnet>(&own.subnet, "CIDR block")?,
            gateway: parsed::<Ipv4Addr>(&own.gateway, "gateway")?,
            range: parsed::<Subnet>(&own.ip_range, "IPRange")?,
            reserved: own
                .auxiliary_addresses
                .into_iter()
                .filter_map(|(name, address)| {
                    let address = parsed(&address, "auxiliary address").transpose()?;
                    Some(address.map(|address| (name, address)))
                })
                .collect::<ApiResult<_>>()?,
            internal: self.internal,
            labels: self.labels,
            options: self.options,
            made_by: Vec::new(),
        })
    }
}

impl Ipam {
    fn is_default(&self) -> bool {
        matches!(self.driver.as_str(), "" | "default")
    }
}

impl IpamConfig {
    fn is_empty(&self) -> bool {
        self.subnet.is_empty() && self.ip_range.is_empty() && self.gateway.is_empty()
    }
}

/// Who is where in networks between cells, for all that one call shows.
#[derive(Debug, Default)]
pub struct Endpoints {
    networks: BTreeMap<String, Network>,
    /// By the network's name and the cell's id.
    addresses: BTreeMap<(String, String), Ipv4Addr>,
}

impl Endpoints {
    /// Of the networks of `containers`. Blocks.
    pub fn of<'a>(
        layout: &Layout,
        containers: impl IntoIterator<Item = &'a Container>,
    ) -> ApiResult<Self> {
        let containers = containers.into_iter();
        let own = containers.flat_map(|container| &container.spec.networks);
        let mut names: Vec<&str> = own.map(|own| own.network.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let networks = Networks::of(layout);
        let mut found = Self::default();
        for name in names {
            // One that was removed is shown by its name alone.
            let Ok(network) = networks.find(name) else { continue };
            for member in switches::members(layout, &network)? {
                found.addresses.insert((network.name.clone(), member.cell), member.address);
            }
            found.networks.insert(network.name.clone(), network);
        }
        Ok(found)
    }

    /// `NetworkSettings.Networks` of a container.
    pub fn show(&self, container: &Container) -> Value {
        if container.spec.within.is_some() {
            // As docker has it: they are the other container's.
            return json!({});
        }
        let networks = container.spec.networks.iter();
        let mut own: serde_json::Map<String, Value> =
            networks.map(|own| (own.network.clone(), self.endpoint(container, own))).collect();
        if own.is_empty() {
            let mut shown = bare(plain(container));
            if !container.options.is_empty() {
                shown["DriverOpts"] = json!(container.options);
            }
            own.insert(plain(container).to_owned(), shown);
        }
        let gateway = ports::gateway(&container.spec.publish);
        if !gateway.is_empty() {
            own.values_mut().for_each(|shown| shown["Gateway"] = gateway.clone().into());
        }
        Value::Object(own)
    }

    fn endpoint(&self, container: &Container, own: &Attachment) -> Value {
        let mut shown = bare(&own.network);
        let place = (own.network.clone(), container.id().to_owned());
        let address = self.addresses.get(&place);
        if let Some(network) = self.networks.get(&own.network) {
            shown["NetworkID"] = network.id.clone().into();
            if let Some(address) = address {
                shown["EndpointID"] = endpoint_id(network, container.id()).into();
                shown["Gateway"] = network.addresses.gateway.to_string().into();
                shown["IPAddress"] = address.to_string().into();
                shown["IPPrefixLen"] = network.addresses.subnet.prefix().into();
                shown["MacAddress"] = mac_address().into();
            }
        }
        if let Some(address) = own.address {
            shown["IPAMConfig"] = json!({ "IPv4Address": address });
        }
        if !own.links.is_empty() {
            let links = own.links.iter().map(|(alias, name)| format!("{name}:{alias}"));
            shown["Links"] = json!(links.collect::<Vec<_>>());
        }
        if !own.options.is_empty() {
            shown["DriverOpts"] = json!(own.options);
        }
        if !own.aliases.is_empty() {
            shown["Aliases"] = json!(own.aliases);
        }
        shown["DNSNames"] = json!(own.join(container.id(), container.name()).names);
        shown
    }
}

/// As long as ids are, and the same for the same place.
fn endpoint_id(network: &Network, cell: &str) -> String {
    let half = |id: &str| id.get(..32).unwrap_or(id).to_owned();
    half(cell) + &half(&network.id)
}

/// What a container is in that is in no network between cells.
fn plain(container: &Container) -> &'static str {
    match container.host["NetworkMode"].as_str() {
        _ if container.config.network_disabled => "none",
        Some("none") => "none",
        _ => "bridge",
    }
}

fn bare(name: &str) -> Value {
    json!({
        "IPAMConfig": null, "Links": null, "Aliases": null, "NetworkID": name, "EndpointID": "",
        "Gateway": "", "IPAddress": "", "IPPrefixLen": 0, "IPv6Gateway": "",
        "GlobalIPv6Address": "", "GlobalIPv6PrefixLen": 0, "MacAddress": "", "DriverOpts": null,
        "DNSNames": null,
    })
}

/// The networks between cells that a new container is to be in, by all that its client says.
///
/// # Errors
/// 400 or 404 for what is none.
pub fn attachments(networks: &Networks, create: &Create) -> ApiResult<Vec<Attachment>> {
    let mode = create.host.network_mode.as_str();
    let mut own: Vec<Attachment> = Vec::new();
    let named = create.endpoints.iter().map(|(name, endpoint)| (name.as_str(), endpoint));
    let nothing = Endpoint::default();
    for (key, endpoint) in [(mode, &nothing)].into_iter().chain(named) {
        if admit::is_foreign(key) {
            // Refused in words of its own.
            continue;
        }
        if (key == "none") != (mode == "none") {
            return Err(bad(format!(
                "conflicting options: the network mode {mode:?} and the network {key}"
            )));
        }
        if matches!(key, "" | "default") || BUILT_IN.contains(&key) {
            endpoint.check_plain(key)?;
            continue;
        }
        // A client takes "not found" for its image's, which it then pulls.
        let network = networks.find(key).map_err(|error| match error {
            CellError::Usage(_) => bad(format!("network {key} not found")),
            error => error.into(),
        })?;
        let wanted = endpoint.attachment(&network)?;
        own.retain(|other| other.network != wanted.network);
        own.push(wanted);
    }
    Ok(own)
}

/// `CONTAINER[:ALIAS]`: what the container calls another, and the other's own name.
fn link_of(text: &str) -> ApiResult<(String, String)> {
    let (name, alias) = text.split_once(':').unwrap_or((text, text));
    match name.is_empty() || alias.is_empty() {
        true => Err(bad(format!("bad format for links: {text}"))),
        false => Ok((alias.to_owned(), name.trim_start_matches('/').to_owned())),
    }
}

impl Endpoint {
    /// Only networks that were made have names and addresses to give.
    fn check_plain(&self, name: &str) -> ApiResult<()> {
        let has_names = !self.aliases.is_empty() || !self.links.is_empty();
        self.options()?;
        match !has_names && self.address()?.is_none() {
            true => Ok(()),
            false => Err(bad(format!(
                "network-scoped aliases and addresses are for networks that were made, and {name} \
                 is not one: docker network create makes one"
            ))),
        }
    }

    fn address(&self) -> ApiResult<Option<Ipv4Addr>> {
        parsed(&self.ipam_config.ipv4_address, "IPv4 address")
    }

    /// What its client notes for a driver of its own; those of docker's would change something.
    fn options(&self) -> ApiResult<BTreeMap<String, String>> {
        match self.driver_opts.keys().find(|name| name.starts_with("com.docker.network.")) {
            Some(name) => Err(ApiError::unsupported(
                format!("the option {name} of an endpoint"),
                "leave it out: a container has one link, whose networks are told apart by their \
                 addresses",
            )),
            None => Ok(self.driver_opts.clone()),
        }
    }

    fn attachment(&self, network: &Network) -> ApiResult<Attachment> {
        let mut aliases: Vec<String> = Vec::new();
        for alias in self.aliases.iter().filter(|alias| !alias.is_empty()) {
            if !aliases.contains(alias) {
                aliases.push(alias.clone());
            }
        }
        let links = self.links.iter().map(|link| link_of(link)).collect::<ApiResult<_>>()?;
        let (address, options) = (self.address()?, self.options()?);
        Ok(Attachment { aliases, links, address, options, ..Attachment::plain(&network.name) })
    }
}

fn built_in(name: &str) -> Value {
    let driver = if name == "none" { "null" } else { "bridge" };
    json!({
        "Name": name, "Id": name, "Created": NEVER, "Scope": "local", "Driver": driver,
        "EnableIPv4": true, "EnableIPv6": false,
        "IPAM": { "Driver": "default", "Options": null, "Config": [] }, "Internal": false,
        "Attachable": false, "Ingress": false, "ConfigFrom": { "Network": "" },
        "ConfigOnly": false, "Containers": {}, "Options": {}, "Labels": {},
    })
}

fn show(network: &Network) -> Value {
    let addresses = &network.addresses;
    let mut config = json!({
        "Subnet": addresses.subnet.to_string(), "Gateway": addresses.gateway.to_string(),
    });
    if let Some(range) = addresses.range {
        config["IPRange"] = range.to_string().into();
    }
    if !network.reserved.is_empty() {
        config["AuxiliaryAddresses"] = json!(network.reserved);
    }
    let mut shown = built_in(&network.name);
    shown["Id"] = network.id.clone().into();
    shown["Created"] = rfc3339_ms(network.created_ms).into();
    shown["IPAM"]["Config"] = json!([config]);
    shown["Internal"] = network.internal.into();
    shown["Options"] = json!(network.options);
    shown["Labels"] = json!(network.labels);
    shown
}

fn whole(server: &Server, network: &Network) -> ApiResult<Value> {
    let mut shown = show(network);
    let prefix = network.addresses.subnet.prefix();
    for member in switches::members(server.layout(), network)? {
        // One that ends meanwhile has no name any more.
        let name =
            server.containers.find(&member.cell).map(|seen| seen.container.name().to_owned());
        shown["Containers"][&member.cell] = json!({
            "Name": name.unwrap_or_default(), "EndpointID": endpoint_id(network, &member.cell),
            "MacAddress": mac_address(), "IPv4Address": format!("{}/{prefix}", member.address),
            "IPv6Address": "",
        });
    }
    Ok(shown)
}

fn passes(shown: &Value, filters: &Filters) -> bool {
    let text = |field: &str| shown[field].as_str().unwrap_or_default();
    let labels: BTreeMap<String, String> =
        serde_json::from_value(shown["Labels"].clone()).unwrap_or_default();
    let is_built_in = BUILT_IN.contains(&text("Name"));
    filters.names("name", text("Name"))
        && filters.any("id", |wanted| text("Id").starts_with(wanted))
        && filters.any("driver", |wanted| text("Driver") == wanted)
        && filters.any("scope", |wanted| text("Scope") == wanted)
        && filters.any("type", |wanted| (wanted == "builtin") == is_built_in)
        && filters.labels(&labels)
}

/// `GET /networks`
pub async fn list(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &FILTERS)?;
    let all = server.blocking(move |server| {
        let networks = Networks::of(server.layout());
        let mut shown: Vec<Value> = BUILT_IN.into_iter().map(built_in).collect();
        shown.extend(networks.all()?.iter().map(show));
        shown.retain(|network| passes(network, &filters));
        if let Some(wanted) = filters.values("dangling").first() {
            let unused = |network: &Value| -> ApiResult<bool> {
                let found = networks.find(network["Name"].as_str().unwrap_or_default());
                found.map_or(Ok(false), |found| {
                    Ok(switches::members(server.layout(), &found)?.is_empty())
                })
            };
            let wanted = matches!(wanted.as_str(), "1" | "true");
            let mut kept = Vec::new();
            for network in shown {
                if unused(&network)? == wanted {
                    kept.push(network);
                }
            }
            shown = kept;
        }
        Ok(shown)
    });
    Ok(reply(StatusCode::OK, &all.await?))
}

/// `GET /networks/{id}`
pub async fn inspect(server: &Arc<Server>, key: &str) -> ApiResult<Response> {
    if BUILT_IN.contains(&key) {
        return Ok(reply(StatusCode::OK, &built_in(key)));
    }
    let key = key.to_owned();
    let shown = server.blocking(move |server| {
        let network = Networks::of(server.layout()).find(&key).map_err(starts::not_found)?;
        whole(server, &network)
    });
    Ok(reply(StatusCode::OK, &shown.await?))
}

fn tell(server: &Server, network: &Network, action: &str, container: Option<&str>) {
    let own = [("name", network.name.as_str()), ("type", "bridge")];
    let own = own.into_iter().chain(container.map(|id| ("container", id)));
    let attributes = own.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    server.events.tell(Event::new("network", action, &network.id, attributes));
}

/// Whether a container of a cell's may be called so in the networks that it joins: who is there
/// already keeps its names, and in a network that the cell has not made nobody comes to be called as
/// a host of the world's.
///
/// # Errors
/// 403 for another's name.
pub fn check_member(
    containers: &Containers,
    caller: &Caller,
    (id, name): (&str, &str),
    joined: &[Attachment],
) -> ApiResult<()> {
    if caller.cell().is_none() || joined.is_empty() {
        return Ok(());
    }
    let networks = Networks::of(containers.layout());
    let mut others = containers.all()?;
    others.retain(|seen| !caller.owns(&seen.container));
    for own in joined {
        let names = own.join(id, name).names;
        let network = networks.find(&own.network).map_err(starts::not_found)?;
        let dotted = names.iter().find(|name| name.contains('.'));
        if let (Some(dotted), false) = (dotted, caller.has_made(&network.made_by)) {
            return Err(refused(format!(
                "a container that a cell makes has no name with a dot ({dotted}) in the network {}, \
                 which the cell has not made",
                network.name
            )));
        }
        for other in &others {
            let there = other.container.spec.networks.iter();
            let mut there = there.filter(|there| there.network == network.name);
            let taken = there.find_map(|there| {
                let taken = there.join(other.id(), other.container.name()).names;
                names.iter().find(|name| taken.contains(name))
            });
            if let Some(taken) = taken {
                return Err(refused(format!(
                    "{taken} is what the container {} is called in the network {}; give yours \
                     another name",
                    other.container.name(),
                    network.name
                )));
            }
        }
    }
    Ok(())
}

/// `POST /networks/create`
pub async fn create(server: &Arc<Server>, call: Call) -> ApiResult<Response> {
    let (made_by, caller) = (call.caller.line(), call.caller.clone());
    let wanted: NetworkCreate = call.fields(fields::NETWORK_CREATE).await?;
    let attachable = wanted.attachable.then_some("attachable");
    let wanted = Wanted { made_by, ..wanted.wanted()? };
    let unused = attachable.into_iter().chain(wanted.options.keys().map(String::as_str));
    let unused: Vec<&str> = unused.collect();
    let warning = match unused.is_empty() {
        true => String::new(),
        false => format!("these options are noted and change nothing: {}", unused.join(", ")),
    };
    let made = server.blocking(move |server| {
        let networks = Networks::of(server.layout());
        shares::check_networks(&networks, &caller)?;
        shares::check_unused(&server.containers, &caller, "network", &wanted.name)?;
        networks.create(wanted).map_err(|error| match error {
            CellError::Usage(message) if message.contains("already exists") => {
                ApiError::conflict(message)
            }
            error => error.into(),
        })
    });
    let network = made.await?;
    tell(server, &network, "create", None);
    Ok(reply(StatusCode::CREATED, &json!({ "Id": network.id, "Warning": warning })))
}

/// Whether a cell may remove a network: one that it may tidy up, and which no container of others
/// has, be it stopped.
fn check_removes(server: &Server, caller: &Caller, network: &Network) -> ApiResult<()> {
    shares::check_tidies(caller, "network", &network.name, &network.made_by, &network.labels)?;
    shares::check_unused(&server.containers, caller, "network", &network.name)
}

/// `DELETE /networks/{id}`
pub async fn remove(server: &Arc<Server>, key: &str, caller: &Caller) -> ApiResult<Response> {
    if BUILT_IN.contains(&key) {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            format!("{key} is a pre-defined network and cannot be removed"),
        ));
    }
    let (key, caller) = (key.to_owned(), caller.clone());
    let removed = server.blocking(move |server| {
        let networks = Networks::of(server.layout());
        let network = networks.find(&key).map_err(starts::not_found)?;
        check_removes(server, &caller, &network)?;
        switches::remove(server.layout(), &network).map_err(|error| match error {
            CellError::Usage(message) => ApiError::new(
                StatusCode::FORBIDDEN,
                format!("error while removing network: {message}"),
            ),
            error => error.into(),
        })?;
        Ok(network)
    });
    tell(server, &removed.await?, "destroy", None);
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `POST /networks/prune`
pub async fn prune(server: &Arc<Server>, call: &Call) -> ApiResult<Response> {
    let filters = Filters::of(&call.target.query, &["label", "label!", "until"])?;
    let until_ms = filters.until_ms()?;
    let caller = call.caller.clone();
    let removed = server.blocking(move |server| {
        let networks = Networks::of(server.layout());
        let mut removed = Vec::new();
        for network in networks.all()? {
            // One that somebody is in, or comes into now, stays.
            if filters.labels(&network.labels)
                && until_ms.is_none_or(|until| network.created_ms < until)
                && check_removes(server, &caller, &network).is_ok()
                && switches::remove(server.layout(), &network).is_ok()
            {
                removed.push(network);
            }
        }
        Ok(removed)
    });
    let removed = removed.await?;
    removed.iter().for_each(|network| tell(server, network, "destroy", None));
    let names: Vec<&str> = removed.iter().map(|network| network.name.as_str()).collect();
    Ok(reply(StatusCode::OK, &json!({ "NetworksDeleted": names })))
}

/// The network and the container that a call is about.
async fn both(server: &Arc<Server>, key: &str, container: &str) -> ApiResult<(Network, Seen)> {
    if BUILT_IN.contains(&key) {
        return Err(ApiError::unsupported(
            format!("joining or leaving the network {key} later"),
            "make a network (docker network create); what a container reaches beside is what exocell \
             serve grants it",
        ));
    }
    let key = key.to_owned();
    let found = server.blocking(move |server| {
        Networks::of(server.layout()).find(&key).map_err(starts::not_found)
    });
    Ok((found.await?, server.find(container).await?))
}

/// `POST /networks/{id}/connect`
pub async fn connect(server: &Arc<Server>, key: &str, call: Call) -> ApiResult<Response> {
    let caller = call.caller.clone();
    let wanted: Connect = call.fields(fields::NETWORK_CONNECT).await?;
    let (network, seen) = both(server, key, &wanted.container).await?;
    caller.check_owns(&seen.container)?;
    if seen.container.made_by.is_empty() {
        shares::check_maker("network", &network.name, &network.made_by, seen.id())?;
    }
    let own = wanted.endpoint_config.attachment(&network)?;
    let (joined, id, name) = (own.clone(), seen.id().to_owned(), seen.container.name().to_owned());
    let checked = server.blocking(move |server| {
        starts::check_own(&Networks::of(server.layout()), &caller, &joined.network)?;
        check_member(&server.containers, &caller, (&id, &name), std::slice::from_ref(&joined))
    });
    checked.await?;
    if seen.container.spec.within.is_some() {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "container sharing network namespace with another container or host cannot be \
             connected to any other network",
        ));
    }
    if plain(&seen.container) == "none" && seen.container.spec.networks.is_empty() {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "container cannot be connected to multiple networks with one of the networks in private \
             (none) mode",
        ));
    }
    if seen.container.spec.networks.iter().any(|other| other.network == own.network) {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            format!(
                "endpoint with name {} already exists in network {}",
                seen.container.name(),
                network.name
            ),
        ));
    }
    let live = server.live(seen.id());
    let held = live.changing.clone().lock_owned().await;
    let id = seen.id().to_owned();
    server
        .blocking(move |server| {
            let _held = held;
            let mut seen = server.containers.find(&id)?;
            if let (true, Some((record, _))) = (seen.is_running(), &seen.cell) {
                seen.awake()?;
                let spec = &seen.container.spec;
                switches::connect(server.layout(), record, spec, own.clone())?;
            }
            change(&mut seen.container, |networks| {
                // Another client may have been as fast.
                networks.retain(|other| other.network != own.network);
                networks.push(own);
            })?;
            note_ended(&seen)?;
            server.containers.write(&seen.container)
        })
        .await?;
    tell(server, &network, "connect", Some(seen.id()));
    Ok(empty(StatusCode::OK))
}

/// `POST /networks/{id}/disconnect`
pub async fn disconnect(server: &Arc<Server>, key: &str, call: Call) -> ApiResult<Response> {
    let caller = call.caller.clone();
    let wanted: Connect = call.fields(fields::NETWORK_CONNECT).await?;
    let (network, seen) = both(server, key, &wanted.container).await?;
    caller.check_owns(&seen.container)?;
    let is_in = seen.container.spec.networks.iter().any(|own| own.network == network.name);
    // As docker has it, with force too.
    if !is_in {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            format!("container {} is not connected to network {}", seen.id(), network.name),
        ));
    }
    let live = server.live(seen.id());
    let held = live.changing.clone().lock_owned().await;
    let (id, name) = (seen.id().to_owned(), network.name.clone());
    server
        .blocking(move |server| {
            let _held = held;
            let mut seen = server.containers.find(&id)?;
            if let (true, Some((record, _))) = (seen.is_running(), &seen.cell) {
                seen.awake()?;
                let request = ControlRequest::Leave { network: name.clone() };
                Client::connect(record)?.ask(&request)?;
            }
            change(&mut seen.container, |networks| networks.retain(|own| own.network != name))?;
            note_ended(&seen)?;
            server.containers.write(&seen.container)
        })
        .await?;
    tell(server, &network, "disconnect", Some(seen.id()));
    Ok(empty(StatusCode::OK))
}

/// Has the record of a container that has ended say which networks it is in: that holds for each of
/// its starts.
fn note_ended(seen: &Seen) -> ApiResult<()> {
    let Some((record, _)) = seen.cell.as_ref().filter(|_| !seen.is_running()) else {
        return Ok(());
    };
    let networks = &seen.container.spec.networks;
    for _ in 0..RELEASE_LOOKS {
        // Its supervisor may not have let go of it yet; or another has begun.
        match record.set_networks(networks) {
            Err(CellError::Usage(_)) => std::thread::sleep(RELEASE_LOOK),
            done => return Ok(done?),
        }
    }
    Ok(record.set_networks(networks)?)
}

/// Changes which networks a container is in, and what its table grants with that.
fn change(container: &mut Container, change: impl FnOnce(&mut Vec<Attachment>)) -> ApiResult<()> {
    let networks = &mut container.spec.networks;
    change(networks);
    if networks.len() > CapabilitySet::JOINED_MAX {
        return Err(bad(format!(
            "a container is in at most {} networks",
            CapabilitySet::JOINED_MAX
        )));
    }
    let join: Vec<&String> = networks.iter().map(|own| &own.network).collect();
    let mut table: Value = serde_json::from_str(&container.spec.capabilities)
        .map_err(|error| ApiError::internal(format!("its grant: {error}")))?;
    if !join.is_empty() || table["network"].is_object() {
        table["network"]["join"] = json!(join);
    }
    container.spec.capabilities = table.to_string();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use exocell_cell::Layout;

    #[test]
    fn a_container_is_in_what_its_client_names_by_mode_or_endpoint() {
        let place = tempfile::tempdir().unwrap();
        let networks = Networks::of(&Layout::new(place.path()));
        let made = networks.create(Wanted { name: "net".into(), ..Wanted::default() }).unwrap();
        let read = |mode: &str, endpoints: Value| {
            let body = json!({
                "Image": "i", "HostConfig": { "NetworkMode": mode },
                "NetworkingConfig": { "EndpointsConfig": endpoints },
            });
            attachments(&networks, &Create::read(body)?)
        };
        let names = |mode: &str, endpoints: Value| {
            let own = read(mode, endpoints).unwrap();
            own.into_iter().map(|own| (own.network, own.aliases)).collect::<Vec<_>>()
        };
        let plain = [("net".to_owned(), Vec::new())];
        assert_eq!(names("net", json!({})), plain);
        assert_eq!(names(&made.id, json!({})), plain);
        assert_eq!(names("bridge", json!({ "net": null })), plain);
        let named = json!({ "net": { "Aliases": ["a", "a", ""],
            "IPAMConfig": { "IPv4Address": "172.18.0.9" } } });
        assert_eq!(names("net", named.clone()), [("net".to_owned(), vec!["a".to_owned()])]);
        let own = read("net", named).unwrap();
        assert_eq!(own[0].address, Some(Ipv4Addr::new(172, 18, 0, 9)));
        for mode in ["", "default", "bridge", "none"] {
            assert!(names(mode, json!({})).is_empty(), "{mode}");
        }
        for (mode, endpoints, word) in [
            ("other", json!({}), "network other not found"),
            ("none", json!({ "net": {} }), "conflicting options"),
            ("net", json!({ "none": {} }), "conflicting options"),
            ("bridge", json!({ "bridge": { "Aliases": ["a"] } }), "networks that were made"),
            ("net", json!({ "net": { "IPAMConfig": { "IPv4Address": "x" } } }), "invalid IPv4"),
            ("net", json!({ "net": { "Links": [":b"] } }), "bad format for links"),
            (
                "net",
                json!({ "net": { "DriverOpts": { "com.docker.network.endpoint.ifname": "x" } } }),
                "com.docker.network.endpoint.ifname",
            ),
            (
                "bridge",
                json!({ "bridge": { "DriverOpts": { "com.docker.network.x": "b" } } }),
                "com.docker.network.x",
            ),
        ] {
            let error = read(mode, endpoints).unwrap_err();
            assert!(error.message.contains(word), "{mode}: {error}");
        }
    }
}
