package artifact

import (
	"cmp"
	"errors"
	"strconv"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// VolumeCommand returns `barchan volume`.
func VolumeCommand(a *app.App) *cobra.Command {
	return app.NounCommand("volume", "Keep files that outlive sandboxes, and that sandboxes share",
		volumeCreateCommand(a), volumeLsCommand(a), volumeShowCommand(a), volumeRmCommand(a), volumeCpCommand(a))
}

func volumeCreateCommand(a *app.App) *cobra.Command {
	var capacity string
	var elsewhere elsewhereFlags
	cmd := &cobra.Command{
		Use: "create VOLUME", Short: "Create a volume",
		Long: "Create a volume, empty or with the files of a bucket or an NFS server, and print its ID.\n" +
			"Sandboxes mount it with `barchan run --volume VOLUME:/PATH`.\n\n" +
			"No argument has the secret of a bucket's key: other users would see it. The server keeps\n" +
			"the key, encrypted, as long as the volume. One whose files cannot be reached is not made.",
		Example: "  barchan volume create data --capacity 50Gi\n  barchan run --volume data:/mnt/data -- sh -c 'date > /mnt/data/now'\n" +
			"  barchan volume create models --s3 https://s3.eu-central-1.amazonaws.com/acme-models/v2 --region eu-central-1 \\\n" +
			"    --access-key-id AKIAEXAMPLE --secret-file key --read-only\n" +
			"  barchan volume create home --nfs nfs.example.com:/srv/home",
	}
	cmd.Flags().StringVar(&capacity, "capacity", "", "space for its files, such as 50Gi (default 10Gi)")
	elsewhere.register(cmd)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		n := client.VolumeOptions{Name: args[0]}
		if capacity != "" {
			q, err := resource.ParseQuantity(capacity)
			if err != nil || q.Sign() <= 0 {
				return app.Usage(cmd, errors.New("--capacity: want an amount of space, such as 500Mi or 50Gi"))
			}
			n.Capacity = q.Value()
		}
		if err := elsewhere.add(cmd, a, &n); err != nil {
			return err
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			v, err := t.REST.CreateVolume(cmd.Context(), n)
			if err != nil {
				return err
			}
			return a.Result(v, v.VolumeID)
		})
	}
	return cmd
}

func volumeLsCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List volumes",
		Long: "List the volumes of the key's namespace. USED and FILES are as they were last measured; those elsewhere are not.\n" +
			"STATE is Ready, or why sandboxes cannot mount the volume now.",
	}
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			list, err := t.REST.Volumes(cmd.Context())
			if err != nil {
				return err
			}
			return app.PrintList(a, app.Columns[client.Volume]{
				Header: []string{"ID", "NAME", "CAPACITY", "USED", "SANDBOXES", "BACKEND", "STATE", "FILES", "SOURCE"}, Wide: 2,
				None: "no volumes; `barchan volume create VOLUME` makes one",
				Row: func(v *client.Volume) []string {
					return []string{v.VolumeID, v.Name, terminal.Size(v.Capacity), used(v), strconv.Itoa(v.Sandboxes), v.Backend, volumeState(v), strconv.FormatInt(v.Files, 10), v.Source}
				},
			}, list)
		})
	}
	return cmd
}

// used is empty for files that are not measured.
func used(v *client.Volume) string {
	if v.Source != "" {
		return "-"
	}
	return terminal.Size(v.Used)
}

func volumeState(v *client.Volume) string {
	if v.Ready {
		return "Ready"
	}
	return cmp.Or(v.Reason, "Pending")
}

func volumeShowCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{Use: "show VOLUME", Short: "Show one volume, by its name or ID"}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			v, err := t.REST.Volume(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			v.Token = "" // gives access to the files
			if a.JSON {
				return a.PrintJSON(v)
			}
			line := func(name, value string) { a.Field(10, name, value) }
			line("ID", v.VolumeID)
			line("Name", v.Name)
			line("Capacity", terminal.Size(v.Capacity))
			if v.Source == "" {
				line("Used", terminal.Size(v.Used)+", of "+strconv.FormatInt(v.Files, 10)+" files")
			}
			line("Sandboxes", strconv.Itoa(v.Sandboxes))
			line("Backend", v.Backend)
			line("Source", v.Source)
			if v.ReadOnly {
				line("Access", "read-only")
			}
			line("State", volumeState(&v))
			line("Message", v.Message)
			return nil
		})
	}
	return cmd
}

func volumeRmCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "rm VOLUME...", Short: "Delete volumes with their files",
		Long: "Delete volumes with their files. The files of one that sandboxes mount stay until none does; paused ones count.",
	}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			return a.Each(args, func(name string) (string, error) {
				v, err := t.REST.Volume(cmd.Context(), name)
				if err != nil {
					return name, err
				}
				return v.VolumeID, t.REST.DeleteVolume(cmd.Context(), v.VolumeID)
			})
		})
	}
	return cmd
}
