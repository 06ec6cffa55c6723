//! A cell's own certificate authority, for the hosts whose TLS is opened: those
//! that have a secret, and no others.
//!
//! ```text
//! plan: authority's key ── signs ──> a certificate for each host ──> the stack, with their keys
//!       authority's certificate ──> the guest's trusted ones
//! ```
//! The authority's key is dropped where it was made: nobody can sign another
//! certificate, and the authority vouches for those hosts alone.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, NameConstraints,
};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::Secrets;

/// How long before now the certificates begin, for clocks that differ.
const EARLY: Duration = Duration::from_secs(24 * 3600);
/// How long they hold; clients refuse more than 398 days.
const VALIDITY: Duration = Duration::from_secs(396 * 24 * 3600);
/// What is spoken inside (RFC 7301). Of HTTP/2 no heads are read.
const SPOKEN: &[u8] = b"http/1.1";

/// Why a cell has no authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("no certificate can be made for {host}: {why}")]
    Certificate { host: String, why: String },
    #[error("no trusted certificates in {path}: {why}; it must hold some in the form PEM")]
    Roots { path: PathBuf, why: String },
}

/// The certificates of one cell, and how hosts are verified.
pub struct Authority {
    certificate: String,
    hosts: HashMap<String, (Arc<ServerConfig>, ServerName<'static>)>,
    client: Arc<ClientConfig>,
}

/// What opens the TLS of one stream.
#[derive(Clone, Debug)]
pub struct Opener {
    /// Towards the guest.
    pub server: Arc<ServerConfig>,
    /// Towards the host.
    pub client: Arc<ClientConfig>,
    pub name: ServerName<'static>,
    pub port: u16,
    pub secrets: Secrets,
}

impl Authority {
    /// The authority for the hosts that have a secret over TLS; `None` where there
    /// are none. Hosts are verified by the certificates in the file `roots`, else
    /// by those that browsers trust.
    ///
    /// # Errors
    /// For a file that holds no certificates, and a name that no certificate has.
    pub fn new(secrets: &Secrets, roots: Option<&Path>) -> Result<Option<Self>, AuthorityError> {
        let mut names: Vec<&str> =
            secrets.iter().filter(|own| own.tls).map(|own| own.host.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let Some(first) = names.first() else { return Ok(None) };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let failed = |host: &str| {
            let host = host.to_owned();
            move |why: String| AuthorityError::Certificate { host, why }
        };
        let issuer = issuer(&names).map_err(|error| failed(first)(error.to_string()))?;
        let certificate = issuer.1;
        let of_host = |name: &&str| {
            let config = server(name, &issuer.0, &provider).map_err(failed(name))?;
            let known = ServerName::try_from((*name).to_owned());
            let known = known.map_err(|error| failed(name)(error.to_string()))?;
            Ok(((*name).to_owned(), (Arc::new(config), known)))
        };
        let hosts = names.iter().map(of_host).collect::<Result<_, _>>()?;
        let client = client(trusted(roots)?, provider).map_err(failed(first))?;
        Ok(Some(Self { certificate, hosts, client: Arc::new(client) }))
    }

    /// The authority's certificate, in the form PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// What opens a stream to `host` and `port`, whose requests may get `secrets`;
    /// `None` where it has none.
    pub fn opener(&self, host: &str, port: u16, secrets: Secrets) -> Option<Opener> {
        let (server, name) = self.hosts.get(host).filter(|_| !secrets.is_empty())?.clone();
        Some(Opener { server, client: self.client.clone(), name, port, secrets })
    }
}

fn params(names: &[&str]) -> Result<CertificateParams, rcgen::Error> {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names)?;
    let now = SystemTime::now();
    params.not_before = (now - EARLY).into();
    params.not_after = (now + VALIDITY).into();
    Ok(params)
}

/// An authority that vouches for `names` alone, and its certificate.
fn issuer(names: &[&str]) -> Result<(Issuer<'static, KeyPair>, String), rcgen::Error> {
    let mut params = params(&[])?;
    params.distinguished_name.push(DnType::CommonName, "Exocell, this cell alone");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let permitted = names.iter().map(|name| GeneralSubtree::DnsName((*name).to_owned()));
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: permitted.collect(),
        excluded_subtrees: Vec::new(),
    });
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?.pem();
    Ok((Issuer::new(params, key), certificate))
}

/// How the stack answers as `name`.
fn server(
    name: &str,
    issuer: &Issuer<'static, KeyPair>,
    provider: &Arc<CryptoProvider>,
) -> Result<ServerConfig, String> {
    let made = || -> Result<_, rcgen::Error> {
        let mut params = params(&[name])?;
        params.distinguished_name.push(DnType::CommonName, "Exocell");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, issuer)?;
        Ok((certificate.der().clone(), PrivatePkcs8KeyDer::from(key.serialize_der())))
    };
    let (certificate, key) = made().map_err(|error| error.to_string())?;
    let config = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder.with_no_client_auth().with_single_cert(vec![certificate], key.into())
        });
    let mut config = config.map_err(|error| error.to_string())?;
    config.alpn_protocols = vec![SPOKEN.to_vec()];
    Ok(config)
}

fn client(roots: RootCertStore, provider: Arc<CryptoProvider>) -> Result<ClientConfig, String> {
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![SPOKEN.to_vec()];
    Ok(config)
}

fn trusted(roots: Option<&Path>) -> Result<RootCertStore, AuthorityError> {
    let Some(path) = roots else {
        return Ok(webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect());
    };
    let failed = |why: String| AuthorityError::Roots { path: path.to_owned(), why };
    let mut store = RootCertStore::empty();
    let certificates =
        CertificateDer::pem_file_iter(path).map_err(|error| failed(error.to_string()))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| failed(error.to_string()))?;
        store.add(certificate).map_err(|error| failed(error.to_string()))?;
    }
    match store.is_empty() {
        true => Err(failed("it is empty".to_owned())),
        false => Ok(store),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Secret;

    fn secrets(texts: &[&str]) -> Secrets {
        let read = |text: &&str| Secret::read(text, "exocell-secret-1".into(), |_| None).unwrap();
        Secrets::new(texts.iter().map(read).collect())
    }

    #[test]
    fn only_hosts_with_a_secret_over_tls_are_opened() {
        assert!(Authority::new(&secrets(&["A=1@plain.test"]), None).unwrap().is_none());
        let all = secrets(&["A=1@https://a.test", "B=2@https://b.test:8443", "C=3@c.test"]);
        let authority = Authority::new(&all, None).unwrap().unwrap();
        let opener = |host: &str, port| authority.opener(host, port, all.of(host, port, true));
        assert!(opener("a.test", 443).is_some() && opener("b.test", 8443).is_some());
        for (host, port) in [("a.test", 8443), ("b.test", 443), ("c.test", 80), ("x.a.test", 443)] {
            assert!(opener(host, port).is_none(), "{host}:{port}");
        }
        let text = authority.certificate();
        assert!(text.starts_with("-----BEGIN CERTIFICATE-----") && !text.contains("PRIVATE"));
    }

    #[test]
    fn a_file_without_certificates_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let all = secrets(&["A=1@https://a.test"]);
        let path = file.path().display().to_string();
        for content in ["", "nothing\n"] {
            std::fs::write(file.path(), content).unwrap();
            let error = Authority::new(&all, Some(file.path())).err().unwrap().to_string();
            assert!(error.contains(&path), "{error}");
        }
        let missing = Authority::new(&all, Some(Path::new("/no/such/file"))).err().unwrap();
        assert!(missing.to_string().contains("/no/such/file"), "{missing}");
    }
}
