//! Which addresses may be connected to. A name is judged by what it resolves to, when it does:
//! whoever owns a name may have it lead anywhere.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

use super::place::{Place, is_loopback};

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection<'a> {
    /// Whether it is to the registry itself, and not to where that sends us.
    pub is_registry: bool,
    /// Whether the registry is named as one of this host.
    pub registry_is_here: bool,
    pub host: &'a str,
    pub port: u16,
    pub address: IpAddr,
}

type Rule = dyn Fn(&Connection<'_>) -> Result<(), String> + Send + Sync;

/// Says whether a connection may be made, and else why not. With a proxy it is the proxy that
/// connects, and nothing is judged.
#[derive(Clone)]
pub struct Judge(Arc<Rule>);

impl Judge {
    pub fn new(
        rule: impl Fn(&Connection<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(rule))
    }
}

impl fmt::Debug for Judge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Judge")
    }
}

/// Resolves names as the host does, and leaves out what may not be connected to.
#[derive(Debug)]
pub(super) struct Judged {
    registry: Place,
    judge: Judge,
    resolver: DefaultResolver,
}

impl Judged {
    pub fn new(registry: Place, judge: Judge) -> Self {
        Self { registry, judge, resolver: DefaultResolver::default() }
    }
}

impl Resolver for Judged {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let found = self.resolver.resolve(uri, config, timeout)?;
        let is_registry = Place::of(uri).as_ref() == Some(&self.registry);
        let host = uri.host().unwrap_or_default();
        let registry_is_here = is_loopback(self.registry.host());
        let (mut kept, mut why) = (self.empty(), String::new());
        for at in found.iter() {
            let (port, address) = (at.port(), at.ip());
            let connection = Connection { is_registry, registry_is_here, host, port, address };
            match (self.judge.0)(&connection) {
                Ok(()) => kept.push(*at),
                Err(said) => why = said,
            }
        }
        match kept.is_empty() {
            true => Err(ureq::Error::Io(io::Error::other(format!("{host}: {why}")))),
            false => Ok(kept),
        }
    }
}
