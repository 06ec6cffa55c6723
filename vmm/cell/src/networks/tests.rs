use super::*;

fn networks() -> (tempfile::TempDir, Networks) {
    let place = tempfile::tempdir().unwrap();
    let networks = Networks::of(&Layout::new(place.path()));
    (place, networks)
}

fn wanted(name: &str) -> Wanted {
    Wanted { name: name.to_owned(), ..Wanted::default() }
}

#[test]
fn networks_are_made_listed_found_and_removed() {
    let (_place, networks) = networks();
    assert!(networks.all().unwrap().is_empty());
    let first = networks.create(wanted("one")).unwrap();
    let second = networks.create(wanted("two")).unwrap();
    assert_eq!(first.addresses.subnet.to_string(), "172.18.0.0/16");
    assert_eq!(second.addresses.subnet.to_string(), "172.19.0.0/16");
    assert_eq!(first.addresses.gateway, Ipv4Addr::new(172, 18, 0, 1));
    assert_eq!(networks.find("one").unwrap(), first);
    assert_eq!(networks.find(&second.id).unwrap(), second);
    assert_eq!(networks.find(&second.id[..12]).unwrap(), second);
    assert!(networks.find("three").unwrap_err().to_string().contains("network three not found"));
    assert!(networks.find("").is_err());
    assert!(networks.connected(&first).unwrap().is_empty());
    networks.remove(&first).unwrap();
    assert_eq!(networks.all().unwrap(), [second]);
    // Its addresses are free again.
    assert_eq!(networks.create(wanted("three")).unwrap().addresses, first.addresses);
}

#[test]
fn what_is_no_network_is_refused_in_words() {
    let (_place, networks) = networks();
    networks.create(wanted("one")).unwrap();
    let refused = |wanted: Wanted| networks.create(wanted).unwrap_err().to_string();
    for (name, words) in [
        ("one", "already exists"),
        ("host", "choose another name"),
        ("../x", "not the name"),
        (".lock", "not the name"),
        ("", "not the name"),
    ] {
        let error = refused(wanted(name));
        assert!(error.contains(words), "{name}: {error}");
    }
    let subnet = Some("172.18.4.0/24".parse().unwrap());
    assert!(refused(Wanted { subnet, ..wanted("two") }).contains("overlaps"));
    for special in ["127.5.0.0/16", "198.18.0.0/16", "169.254.1.0/24", "0.0.0.0/8", "230.0.0.0/8"] {
        let subnet = Some(special.parse().unwrap());
        assert!(refused(Wanted { subnet, ..wanted("two") }).contains("mean something else"));
    }
    let gateway = Some(Ipv4Addr::new(10, 0, 0, 1));
    assert!(refused(Wanted { gateway, ..wanted("two") }).contains("gateway"));
    let labels = BTreeMap::from([("a".to_owned(), "x".repeat(NOTES_BYTES_MAX))]);
    assert!(refused(Wanted { labels, ..wanted("two") }).contains("at most"));
    assert_eq!(networks.all().unwrap().len(), 1);
}

#[test]
fn a_damaged_network_is_named() {
    let (_place, networks) = networks();
    networks.create(wanted("one")).unwrap();
    fs::write(networks.directory("one").join(FILE), "{").unwrap();
    let error = networks.all().unwrap_err().to_string();
    assert!(error.contains("the network one is damaged") && error.contains(FILE), "{error}");
}

#[test]
fn members_have_each_name_once() {
    let aliases = vec!["DB".into(), "web".into()];
    let attachment = Attachment { aliases, ..Attachment::plain("n") };
    let id = "0123456789abcdef0123456789abcdef";
    let names = attachment.join(id, "Web").names;
    assert_eq!(names, ["web", "0123456789ab", "db"]);
}
