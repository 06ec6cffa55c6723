//! `exocell network`: networks between cells.

use std::io::Write;

use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::networks::{Attachment, Network, Networks, Wanted};
use exocell_cell::switch::Member;
use exocell_cell::{CellError, Layout, Record, State, clock, switches};
use exocell_docker::Filters;
use serde_json::{Value, json};

use super::system::agreed;
use super::{docker, print_json};
use crate::args::{
    NetworkCommand, NetworkConnectArgs, NetworkCreateArgs, NetworkDisconnectArgs,
    NetworkInspectArgs, NetworkLsArgs, NetworkPruneArgs, NetworkRmArgs, RunArgs,
};
use crate::format::Template;
use crate::show::{self, say};

/// What a list can be filtered by.
const FILTERS: [&str; 4] = ["name", "id", "label", "driver"];
/// The only kind.
const DRIVER: &str = "bridge";

pub fn network(layout: &Layout, command: NetworkCommand) -> Result<u8, CellError> {
    let networks = Networks::of(layout);
    match command {
        NetworkCommand::Create(args) => create(layout, &networks, args),
        NetworkCommand::Ls(args) => ls(&networks, &args),
        NetworkCommand::Inspect(args) => inspect(layout, &networks, &args),
        NetworkCommand::Rm(args) => return rm(layout, &networks, &args),
        NetworkCommand::Prune(args) => prune(layout, &networks, &args),
        NetworkCommand::Connect(args) => connect(layout, &networks, &args),
        NetworkCommand::Disconnect(args) => disconnect(layout, &networks, &args),
    }
    .map(|()| 0)
}

fn create(layout: &Layout, networks: &Networks, args: NetworkCreateArgs) -> Result<(), CellError> {
    if args.driver != DRIVER {
        return Err(CellError::Usage(format!(
            "--driver {} is not there: networks between cells are of one kind, {DRIVER}",
            args.driver
        )));
    }
    let opts = docker::labels(layout, &args.opt, &[])?;
    let idle = args.opt.iter().map(|own| format!("--opt {own}"));
    let idle = args.attachable.then(|| "--attachable".to_owned()).into_iter().chain(idle);
    let idle: Vec<String> = idle.collect();
    let network = networks.create(Wanted {
        name: args.network,
        subnet: args.subnet,
        gateway: args.gateway,
        range: args.ip_range,
        internal: args.internal,
        labels: docker::labels(layout, &args.label, &[])?,
        options: opts,
        ..Wanted::default()
    })?;
    if !idle.is_empty() {
        crate::show::tell!("exocell: {} changes nothing of a network here", idle.join(" "));
    }
    say!("{}", network.id);
    Ok(())
}

fn passes(network: &Network, filters: &Filters) -> bool {
    filters.names("name", &network.name)
        && filters.any("id", |wanted| network.id.starts_with(wanted))
        && filters.any("driver", |wanted| wanted == DRIVER)
        && filters.values("label").iter().all(|wanted| {
            let (name, value) = wanted.split_once('=').unzip();
            let own = network.labels.get(name.unwrap_or(wanted));
            own.is_some_and(|own| value.is_none_or(|value| own == value))
        })
}

fn shortened(id: &str, no_trunc: bool) -> &str {
    if no_trunc { id } else { id.get(..12).unwrap_or(id) }
}

fn ls(networks: &Networks, args: &NetworkLsArgs) -> Result<(), CellError> {
    let filters = Filters::of_words(&args.filter, &FILTERS)
        .map_err(|error| CellError::Usage(format!("--filter: {error}")))?;
    let mut all = networks.all()?;
    all.retain(|network| passes(network, &filters));
    if args.quiet {
        all.iter().for_each(|network| say!("{}", shortened(&network.id, args.no_trunc)));
        return Ok(());
    }
    if args.json {
        return all.iter().try_for_each(|network| print_json(&whole(network, &[]), false));
    }
    if let Some(text) = &args.format {
        let rows: Vec<Value> = all.iter().map(|one| named(one, args.no_trunc)).collect();
        return Template::read(text)?.print(&rows);
    }
    let row = |network: &Network| {
        let kind = if network.internal { "internal" } else { DRIVER };
        vec![
            shortened(&network.id, args.no_trunc).to_owned(),
            network.name.clone(),
            kind.to_owned(),
            network.addresses.subnet.to_string(),
        ]
    };
    let rows: Vec<_> = all.iter().map(row).collect();
    show::table(&["NETWORK ID", "NAME", "KIND", "SUBNET"], &rows);
    Ok(())
}

fn whole(network: &Network, members: &[Value]) -> Value {
    json!({
        "id": network.id, "name": network.name, "subnet": network.addresses.subnet,
        "gateway": network.addresses.gateway, "range": network.addresses.range,
        "internal": network.internal, "labels": network.labels,
        "created": clock::rfc3339_ms(network.created_ms), "cells": members,
    })
}

/// The same with docker's names beside, for templates.
fn named(network: &Network, no_trunc: bool) -> Value {
    let labels = network.labels.iter().map(|(name, value)| format!("{name}={value}"));
    let mut row = whole(network, &[]);
    let own = [
        ("ID", shortened(&network.id, no_trunc).to_owned()),
        ("Name", network.name.clone()),
        ("Driver", DRIVER.to_owned()),
        ("Scope", "local".to_owned()),
        ("Subnet", network.addresses.subnet.to_string()),
        ("Internal", network.internal.to_string()),
        ("IPv4", "true".to_owned()),
        ("IPv6", "false".to_owned()),
        ("CreatedAt", clock::rfc3339_ms(network.created_ms)),
        ("Labels", labels.collect::<Vec<_>>().join(",")),
    ];
    for (name, value) in own {
        row[name] = value.into();
    }
    row
}

fn member(layout: &Layout, member: &Member) -> Value {
    let name = Record::find(layout, &member.cell).map(|(_, spec, _)| spec.name);
    json!({
        "id": member.cell, "name": name.ok(), "address": member.address, "names": member.names,
    })
}

fn inspect(
    layout: &Layout,
    networks: &Networks,
    args: &NetworkInspectArgs,
) -> Result<(), CellError> {
    let document = |key: &String| {
        let network = networks.find(key)?;
        let members = switches::members(layout, &network)?;
        let members: Vec<Value> = members.iter().map(|one| member(layout, one)).collect();
        Ok(whole(&network, &members))
    };
    let found = args.networks.iter().map(document).collect::<Result<Vec<_>, CellError>>()?;
    match &args.format {
        Some(text) => Template::read(text)?.print(&found),
        None => print_json(&found, true),
    }
}

fn rm(layout: &Layout, networks: &Networks, args: &NetworkRmArgs) -> Result<u8, CellError> {
    let mut code = 0;
    for key in &args.networks {
        let removed = match networks.find(key) {
            Err(_) if args.force => continue,
            found => found.and_then(|network| switches::remove(layout, &network)),
        };
        match removed {
            Ok(()) => say!("{key}"),
            Err(error) => {
                show::complain(&error);
                code = error.exit_code();
            }
        }
    }
    Ok(code)
}

fn prune(layout: &Layout, networks: &Networks, args: &NetworkPruneArgs) -> Result<(), CellError> {
    if !args.force && !agreed("This removes all networks that no cell is in.")? {
        return Ok(());
    }
    for network in networks.all()? {
        // One that somebody is in, or comes into now, stays.
        if switches::remove(layout, &network).is_ok() {
            say!("{}", network.name);
        }
    }
    std::io::stdout().flush().map_err(CellError::host("cannot write"))
}

fn connect(
    layout: &Layout,
    networks: &Networks,
    args: &NetworkConnectArgs,
) -> Result<(), CellError> {
    let network = networks.find(&args.network)?;
    let (record, spec, status) = Record::find(layout, &args.cell)?;
    if status.state != State::Running {
        return Err(CellError::Usage(format!(
            "cell {} does not run; exocell run --network {} starts one in the network",
            spec.name, network.name
        )));
    }
    exocell_docker::check_network(&network, &spec.id)?;
    let own = Attachment {
        aliases: args.alias.clone(),
        address: args.ip,
        ..Attachment::plain(&network.name)
    };
    switches::connect(layout, &record, &spec, own)
}

fn disconnect(
    layout: &Layout,
    networks: &Networks,
    args: &NetworkDisconnectArgs,
) -> Result<(), CellError> {
    let network = networks.find(&args.network)?;
    let (record, spec, status) = Record::find(layout, &args.cell)?;
    if !spec.networks.iter().any(|own| own.network == network.name) {
        return match args.force {
            true => Ok(()),
            false => Err(CellError::Usage(format!(
                "cell {} is not in the network {}",
                spec.name, network.name
            ))),
        };
    }
    match status.state {
        State::Running => {
            let request = ControlRequest::Leave { network: network.name };
            Client::connect(&record)?.ask(&request).map(drop)
        }
        _ => Err(CellError::Usage(format!(
            "cell {} does not run, and is in no network until it does",
            spec.name
        ))),
    }
}

/// The networks that a run is to be in.
pub fn attachments(layout: &Layout, args: &RunArgs) -> Result<Vec<Attachment>, CellError> {
    let refused = |value: &str, words: &str| {
        Err(CellError::Usage(format!("--network {value} is not there: {words}")))
    };
    let mut own: Vec<Attachment> = Vec::new();
    for text in &args.network {
        let wanted = read(text)?;
        match wanted.network.as_str() {
            "none" | "bridge" | "default" => continue,
            "host" => {
                return refused(
                    "host",
                    "a cell never has the host's own; --allow-net names whom it talks to, and -p \
                     publishes its ports",
                );
            }
            // Found apart (`within`).
            other if other.starts_with(CONTAINER) => continue,
            key => {
                let network = Networks::of(layout).find(key)?;
                exocell_docker::check_network(&network, "")?;
                let network = network.name;
                own.retain(|other| other.network != network);
                own.push(Attachment { network, ..wanted });
            }
        }
    }
    if (!args.network_alias.is_empty() || args.ip.is_some()) && own.len() != 1 {
        return Err(CellError::Usage(
            "--network-alias and --ip are for a cell in one network; write --network \
             name=NETWORK,alias=NAME,ip=ADDRESS for each"
                .to_owned(),
        ));
    }
    if let Some(first) = own.first_mut() {
        first.aliases.extend(args.network_alias.iter().cloned());
        first.address = args.ip.or(first.address);
    }
    Ok(own)
}

/// Begins the name of a cell whose guest another is to be in.
const CONTAINER: &str = "container:";

/// The cell whose guest, and network, another is to have.
///
/// # Errors
/// It is to have another network too.
pub fn within(networks: &[String]) -> Result<Option<&str>, CellError> {
    let Some(named) = networks.iter().find_map(|text| text.strip_prefix(CONTAINER)) else {
        return Ok(None);
    };
    if networks.len() > 1 {
        return Err(CellError::Usage(
            "conflicting options: --network container: takes the other cell's networks, and no \
             other"
                .to_owned(),
        ));
    }
    if named.is_empty() {
        return Err(CellError::Usage(
            "invalid container format container:<name|id>: name the cell".to_owned(),
        ));
    }
    Ok(Some(named))
}

/// `NETWORK`, or `name=NETWORK,alias=NAME,ip=ADDRESS`.
fn read(text: &str) -> Result<Attachment, CellError> {
    let wrong = |why: &str| Err(CellError::Usage(format!("--network: `{text}` {why}")));
    let mut own = Attachment::plain("");
    if !text.contains('=') {
        text.clone_into(&mut own.network);
        return Ok(own);
    }
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("name", name)) => name.clone_into(&mut own.network),
            Some(("alias", alias)) => own.aliases.push(alias.to_owned()),
            Some(("ip", address)) => match address.parse() {
                Ok(address) => own.address = Some(address),
                Err(_) => return wrong("has an ip that is no IPv4 address"),
            },
            _ => return wrong("is not NETWORK or name=NETWORK,alias=NAME,ip=ADDRESS"),
        }
    }
    match own.network.is_empty() {
        true => wrong("names no network"),
        false => Ok(own),
    }
}
