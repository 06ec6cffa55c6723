//! The guest kernel has what a distribution's has: one program each that uses it.

use crate::common::cell::Cell;
use crate::common::compiled::Programs;
use crate::common::{Finished, finish, shell};

/// What only a privileged program of a cell has, as under docker: a name, and a script that
/// succeeds where it is there.
const PROBES: &[(&str, &str)] = &[
    // Packet filters: the rules that container engines and kube-proxy make.
    ("iptables -L", "iptables -L && iptables -t nat -L && ip6tables -L"),
    ("legacy tables", "for t in filter nat mangle raw; do iptables-legacy -t $t -S; done"),
    ("legacy tables of IPv6", "for t in filter nat mangle raw; do ip6tables-legacy -t $t -S; done"),
    ("docker's rules, legacy", "iptables=iptables-legacy; @docker"),
    ("docker's rules, nft", "iptables=iptables-nft; @docker"),
    ("kube-proxy's rules, legacy", "iptables=iptables-legacy; @kube"),
    ("kube-proxy's rules, nft", "iptables=iptables-nft; @kube"),
    (
        "nft",
        "nft -f - <<END
table inet probe {
  set known { type ipv4_addr; flags timeout; }
  map ports { type inet_service : ipv4_addr; elements = { 80 : 10.0.0.1 } }
  chain in { type filter hook input priority 0; policy accept;
    ct state established,related accept
    ip saddr @known limit rate 5/second counter accept
    tcp dport { 22, 80 } log prefix \"in \" reject with tcp reset
    fib daddr type local meta mark set 7; }
  chain nat { type nat hook postrouting priority 100;
    ip saddr 10.9.0.0/16 oifname != \"lo\" masquerade; }
  chain to { type nat hook prerouting priority -100; dnat ip to tcp dport map @ports; }
}
END
nft list ruleset | grep -q masquerade; nft flush ruleset",
    ),
    ("connection tracking", "test -e /proc/sys/net/netfilter/nf_conntrack_max"),
    ("sets of addresses", "ipset create probe hash:ip && ipset destroy probe"),
    // Devices of networks.
    ("kinds of links", "for k in bridge dummy ifb vrf:table:9 wireguard veth; do @link; done"),
    (
        "links on links",
        "ip link add base type dummy; ip link set base up
         ip link add link base name p1 type macvlan mode bridge
         ip link add link base name p2 type vlan id 7
         ip link add p3 type vxlan id 42 dev base dstport 4789
         ip link del base; ip link add base type dummy
         ip link add link base name p4 type ipvlan mode l2; ip link del base",
    ),
    ("bridged packets are filtered", "test -e /proc/sys/net/bridge/bridge-nf-call-iptables"),
    ("vlans of bridges", "ip link add br7 type bridge vlan_filtering 1; bridge vlan; ip link del br7"),
    ("a device of a program", "@probe tun"),
    ("ip tuntap", "ip tuntap add mode tap tap7; ip link del tap7"),
    // Routes and queues.
    (
        "rules and tables of routes",
        "ip rule add fwmark 9 table 99; ip route add blackhole 10.77.0.0/16 table 99
         ip route show table 99 | grep -q 10.77; ip rule | grep -q 'lookup 99'
         ip rule del fwmark 9; ip -6 rule",
    ),
    (
        "queues",
        "ip link add q type dummy
         for kind in fq fq_codel sfq prio 'tbf rate 1mbit burst 32kbit latency 400ms' \
                     'netem delay 100ms loss 1%' 'htb default 10'; do
           tc qdisc replace dev q root $kind
         done
         tc class add dev q parent 1: classid 1:10 htb rate 1mbit 2>/dev/null || \
           { tc qdisc replace dev q root handle 1: htb; tc class add dev q parent 1: classid 1:10 htb rate 1mbit; }
         tc filter add dev q parent 1: protocol ip u32 match ip dport 80 0xffff flowid 1:10
         tc qdisc add dev q clsact
         tc filter add dev q ingress protocol ip flower ip_proto tcp dst_port 80 action drop
         tc filter add dev q egress matchall action mirred egress redirect dev lo
         ip link del q",
    ),
    ("sockets are listed", "ss -tuxanp && ss -ti"),
    // Sandboxes and what looks into processes.
    ("Landlock", "@probe landlock"),
    ("Yama", "@probe ptrace_scope"),
    ("core dumps", "@probe core"),
    ("what /proc tells of a process", "@probe processes"),
    ("events of files", "@probe fanotify"),
    ("handles of files", "@probe handles"),
    ("software events", "@probe perf"),
    ("keyrings", "@probe keys"),
    ("faults of user space", "@probe userfaultfd"),
    ("accounting of processes", "@probe accounting"),
    ("statistics of tasks", "@probe taskstats"),
    ("comparing processes", "@probe kcmp"),
    ("formats of programs", "@probe binary_formats"),
    ("the kernel's configuration", "zcat /proc/config.gz | grep -qx CONFIG_NF_TABLES=y"),
    // Disks.
    (
        "loop devices and swap",
        "truncate -s 8M /disk; mkfs.ext4 -q /disk; mount -o loop /disk /mnt; touch /mnt/file
         umount /mnt; mkswap /disk; device=$(losetup --find --show /disk); swapon $device
         grep -q $device /proc/swaps; swapoff $device; losetup -d $device; rm /disk",
    ),
    (
        "overlays on overlays",
        "mkdir -p /o/lower /o/upper /o/work /o/all; mount -t tmpfs none /o/upper
         mkdir /o/upper/u /o/upper/w; touch /o/lower/file
         mount -t overlay -o lowerdir=/o/lower,upperdir=/o/upper/u,workdir=/o/upper/w none /o/all
         test -e /o/all/file; umount /o/all /o/upper",
    ),
    ("file systems", "for f in squashfs erofs vfat iso9660 fuse; do grep -qw $f /proc/filesystems; done"),
    (
        "limits of disks",
        "cd /sys/fs/cgroup; mkdir -p all; while read -r p; do echo $p > all/cgroup.procs; done < cgroup.procs
         echo '+io +cpuset +cpu +memory +pids' > cgroup.subtree_control
         test -e all/io.max && test -e all/io.pressure && test -e all/memory.swap.max",
    ),
];

/// What `@` stands for in a probe.
const MACROS: &[(&str, &str)] = &[
    ("@probe", "python3 /programs/probe.py"),
    ("@link", "name=${k%%:*}; ip link add x0 type $(echo $k | tr : ' '); ip link del x0"),
    (
        "@docker",
        "$iptables -t nat -N D; $iptables -N D; $iptables -N DI
         $iptables -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j D
         $iptables -t nat -A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j D
         $iptables -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
         $iptables -t nat -A D ! -i docker0 -p tcp -m tcp --dport 80 -j DNAT --to 172.17.0.2:80
         $iptables -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
         $iptables -A FORWARD -i docker0 ! -o docker0 -j DI
         $iptables -A D -d 172.17.0.2/32 ! -i docker0 -p tcp --dport 80 -j ACCEPT
         $iptables -A D -p tcp -m comment --comment podman -m multiport --dports 1,2 -j RETURN
         $iptables -t nat -S | grep -q MASQUERADE; @clean",
    ),
    (
        "@kube",
        "$iptables -t nat -N K; $iptables -N K; $iptables -t mangle -N K
         $iptables -t nat -A K -m mark ! --mark 0x4000/0x4000 -j RETURN
         $iptables -t nat -A K -j MARK --xor-mark 0x4000
         $iptables -t nat -A K -j MASQUERADE --random-fully
         $iptables -t nat -A K -m statistic --mode random --probability 0.5 -j RETURN
         $iptables -t nat -A K -m recent --name x --rcheck --seconds 9 --reap -j RETURN
         $iptables -A K -m conntrack --ctstate INVALID -j DROP
         $iptables -A K -p tcp -j REJECT --reject-with tcp-reset
         $iptables -A K -m limit --limit 5/min -j LOG --log-prefix k
         $iptables -A K -m physdev --physdev-is-bridged -m owner --uid-owner 0 -j ACCEPT
         $iptables -A K -m hashlimit --hashlimit-above 5/sec --hashlimit-name h -j DROP
         $iptables -t mangle -A K -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
         $iptables -t mangle -A K -m socket --transparent -j CONNMARK --save-mark
         @clean",
    ),
    ("@clean", "for t in filter nat mangle; do $iptables -t $t -F; $iptables -t $t -X; done"),
];

fn programs() -> Programs {
    Programs::new().copy("features/probe.py", "probe.py")
}

fn expanded(script: &str) -> String {
    MACROS.iter().fold(script.to_owned(), |script, (name, text)| script.replace(name, text))
}

#[test]
fn it_has_what_a_distributions_kernel_has() {
    let programs = programs();
    let volume = programs.volume();
    let cell = Cell::idle("features", &["--privileged", "-m", "256m", "-v", &volume]);
    let failed: Vec<String> = PROBES
        .iter()
        .filter_map(|(name, script)| {
            let told = cell.shell(&format!("set -e; {}", expanded(script)));
            (told.code != 0).then(|| format!("{name}: {} ({})", told.stderr.trim(), told.code))
        })
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// A bridge, a namespace behind it, and what docker's engine makes for a published port.
const BRIDGED: &str = "
set -e
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link add br0 type bridge; ip addr add 10.9.0.1/24 dev br0; ip link set br0 up
ip link add out type dummy; ip addr add 192.0.2.1/24 dev out; ip link set out up
ip netns add inner
ip link add veth0 type veth peer name eth0 netns inner; ip link set veth0 master br0 up
ip -n inner addr add 10.9.0.2/24 dev eth0; ip -n inner link set eth0 up
ip -n inner link set lo up; ip -n inner route add default via 10.9.0.1
iptables -t nat -A POSTROUTING -s 10.9.0.0/24 ! -o br0 -j MASQUERADE
iptables -t nat -A OUTPUT -m addrtype --dst-type LOCAL -p tcp --dport 8080 \
  -j DNAT --to-destination 10.9.0.2:80
";

/// Answers one connection with the address that it came from.
const ANSWER: &str = "import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print('up', flush=True)
peer, (address, _) = server.accept()
peer.send(address.encode())";

/// Says what the server at an address says.
const ASK: &str = "import socket, sys
print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 20).recv(99).decode())";

#[test]
fn what_runs_behind_a_bridge_has_published_ports_and_reaches_out() {
    let cell = Cell::idle("bridge", &["--privileged"]);
    cell.shell(BRIDGED).ok();
    let python =
        |within: &str, program: &str, at: &str| format!("{within} python3 -c \"{program}\" {at}");
    let asks = |server: String, client: String| {
        cell.shell(&format!("{server} > /tmp/up & until grep -q up /tmp/up; do sleep 0.05; done; {client}; rm /tmp/up"))
    };
    let inner = "ip netns exec inner";
    let published =
        asks(python(inner, ANSWER, "10.9.0.2 80"), python("", ASK, "192.0.2.1 8080")).ok();
    assert_eq!(published.text(), "192.0.2.1");
    let out = asks(python("", ANSWER, "192.0.2.1 9000"), python(inner, ASK, "192.0.2.1 9000")).ok();
    assert_eq!(out.text(), "10.9.0.2");
}

#[test]
fn no_interface_is_there_that_nobody_made() {
    assert_eq!(shell(&[], "ls /sys/class/net").ok().text(), "lo");
    let script = "ip netns add new; ip netns exec new ls /sys/class/net; ip -n new -o link | wc -l";
    assert_eq!(shell(&["--privileged"], script).ok().text(), "lo\n1");
}

/// What an ordinary user of a cell is refused: a name, a script that prints what happens, and that.
const REFUSED: &[(&str, &str, &str)] = &[
    ("programs for the kernel", "@call 321 5 0 0", "EPERM"),
    ("events of the kernel", "@perf", "EACCES"),
    ("faults of the kernel", "@call 323 0", "EPERM"),
    ("the kernel's log", "dmesg >/dev/null 2>&1; echo $?", "1"),
    ("the kernel's addresses", "grep -vc '^0* ' /proc/kallsyms", "0"),
    ("modules", "@call 175 0 0 0", "ENOSYS"),
    ("accounting", "@call 163 0", "EPERM"),
    ("swap", "@call 167 0 0", "EPERM"),
    ("events of whole mounts", "@call 300 4 0", "EPERM"),
    ("packet filters", "nft list ruleset >/dev/null 2>&1; echo $?", "1"),
    ("devices", "ip link add x type dummy 2>&1 | grep -o 'not permitted'", "not permitted"),
];

#[test]
fn an_ordinary_user_gets_nothing_by_it() {
    let programs = programs();
    let volume = programs.volume();
    let cell = Cell::idle("ordinary", &["--privileged", "-v", &volume]);
    for (name, script, expected) in REFUSED {
        let script = script
            .replace("@call", "python3 /programs/probe.py refusal")
            .replace("@perf", "python3 /programs/probe.py perf_refusal");
        let told = as_user(&cell, &script);
        assert_eq!(told.text(), *expected, "{name}: {}", told.stderr);
    }
}

/// What bubblewrap and rootless container engines do first.
const SANDBOX: &str = "unshare --user --map-root-user --net --mount --pid --fork sh -ec '
mount -t tmpfs none /mnt; mkdir /mnt/inside
ip link set lo up; ip link add probe0 type dummy; ip link show probe0 > /dev/null
nft add table ip inside; nft list tables'; nft list tables 2>/dev/null; ls /mnt";

#[test]
fn an_ordinary_user_makes_a_sandbox_of_namespaces() {
    assert_eq!(shell(&["-u", "1000"], SANDBOX).ok().text(), "table ip inside");
}

fn as_user(cell: &Cell, script: &str) -> Finished {
    finish(&mut cell.exec(&["--user", "1000:1000"], &["sh", "-c", script]), b"")
}
