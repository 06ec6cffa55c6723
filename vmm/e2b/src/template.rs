//! What a template is: a name that the operator maps to an image (`--template NAME=IMAGE`), one of
//! the tenant's own (a snapshot), or the name of an image of the store. Nothing is pulled.

use std::sync::Arc;

use exocell_cell::images::{ImageConfig, Reference, Store};

use crate::blocking::blocking;
use crate::error::{Problem, Result};
use crate::keys::Tenant;
use crate::options::Options;

/// The longest name of a template.
const NAME_BYTES_MAX: usize = 512;
/// Images below this are tenants' own.
const OWN: &str = "exocell-e2b";

/// A template, and what its image says.
#[derive(Debug, Clone)]
pub struct Found {
    /// The image's id.
    pub id: String,
    pub alias: Option<String>,
    pub config: ImageConfig,
}

/// The image of the template that `tenant` itself has called `name`, with a tag or without.
///
/// # Errors
/// None can be called so.
pub fn own_image(tenant: &str, name: &str) -> Result<Reference> {
    let wrong = || {
        Problem::invalid(format!(
            "{name:?} cannot be a template's name: use a-z, 0-9, - and _, and a tag after a colon"
        ))
    };
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
    let (bare, _) = name.split_once(':').unwrap_or((name, ""));
    if bare.is_empty() || bare.len() > 100 || !bare.chars().all(plain) {
        return Err(wrong());
    }
    let image: Reference = format!("{OWN}/{tenant}/{name}").parse().map_err(|_| wrong())?;
    // By a digest it would be whosever image that is.
    if image.digest.is_some() { Err(wrong()) } else { Ok(image) }
}

/// The template that `tenant` calls `name`.
///
/// # Errors
/// 404 for what there is not, or is not for the tenant.
pub async fn find(
    options: &Options,
    store: &Arc<Store>,
    tenant: &Tenant,
    name: &str,
) -> Result<Found> {
    let missing = || {
        Problem::not_found(format!(
            "template {name:?} was not found: no template, snapshot or image that this key may use \
             is called so; build it first"
        ))
    };
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(missing());
    }
    let allowed = tenant.templates.as_ref().is_none_or(|all| all.iter().any(|own| own == name));
    let mut wanted = Vec::new();
    match options.templates.get(name) {
        Some(image) if allowed => wanted.push(image.clone()),
        _ => {
            wanted.extend(own_image(&tenant.name, name).map(|own| own.to_string()));
            // A name, and not the beginning of an id; and no other tenant's.
            let named = name.parse::<Reference>().ok().filter(|_| allowed);
            let of_tenants = |own: &Reference| own.repository.starts_with(&format!("{OWN}/"));
            wanted.extend(named.filter(|own| !of_tenants(own)).map(|own| own.to_string()));
        }
    }
    let store = store.clone();
    let found = blocking(move || {
        for name in wanted {
            match image(&store, &name) {
                Err(error) if error.status == hyper::StatusCode::NOT_FOUND => {}
                found => return found.map(Some),
            }
        }
        Ok(None)
    });
    let (id, config) = found.await?.ok_or_else(missing)?;
    Ok(Found { id, alias: Some(name.to_owned()), config })
}

/// Settings of an image that the store has.
fn image(store: &Store, name: &str) -> Result<(String, ImageConfig)> {
    let found = store.resolve(name)?;
    Ok((found.id.to_string(), found.config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenants_image_is_below_its_name() {
        let own = |name: &str| own_image("ann", name).map(|own| own.to_string());
        assert_eq!(own("a-b_1").unwrap(), "exocell-e2b/ann/a-b_1:latest");
        assert_eq!(own("a:v2").unwrap(), "exocell-e2b/ann/a:v2");
        let long = "x".repeat(1000);
        let digest = format!("a:v@sha256:{}", "0".repeat(64));
        for name in
            ["", "../bob/a", "a/b", "A", "a:", "a:b/c", "a@sha256:00", "a\n", &long, &digest]
        {
            assert!(own(name).is_err(), "{name}");
        }
    }
}
