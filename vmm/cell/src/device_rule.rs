//! Rules of devices as clients write them.

use exocell_agent::oci::{DeviceKinds, DeviceRule};

/// `TYPE MAJOR:MINOR ACCESS`, like `c 10:* rwm`: devices of the guest's kernel.
///
/// # Errors
/// It is no such line.
pub fn device_rule(line: &str) -> Result<DeviceRule, String> {
    let wrong = || format!("invalid device cgroup format '{line}'; write 'c 10:200 rwm'");
    let words: Vec<&str> = line.split(' ').collect();
    let [kind, numbers, access] = words.as_slice() else { return Err(wrong()) };
    let kind = match *kind {
        "a" => DeviceKinds::All,
        "b" => DeviceKinds::Block,
        "c" => DeviceKinds::Character,
        _ => return Err(wrong()),
    };
    let number = |text: &str| match text {
        "*" => Ok(None),
        text => text.parse::<u32>().map(|number| Some(i64::from(number))).map_err(|_| wrong()),
    };
    let (major, minor) = numbers.split_once(':').ok_or_else(wrong)?;
    let (major, minor) = (number(major)?, number(minor)?);
    let is_access = (1..=3).contains(&access.len()) && access.chars().all(|c| "rwm".contains(c));
    match is_access {
        true => Ok(DeviceRule { allow: true, kind, major, minor, access: (*access).to_owned() }),
        false => Err(wrong()),
    }
}
