package artifact

import (
	"errors"
	"strconv"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/client/restclient"
)

// VolumeCommand returns `barchan volume`.
func VolumeCommand(a *app.App) *cobra.Command {
	return app.NounCommand("volume", "Keep files that outlive sandboxes, and that sandboxes share",
		volumeCreateCommand(a), volumeLsCommand(a), volumeShowCommand(a), volumeRmCommand(a), volumeCpCommand(a))
}

func volumeCreateCommand(a *app.App) *cobra.Command {
	var capacity string
	cmd := &cobra.Command{
		Use: "create VOLUME", Short: "Create an empty volume",
		Long:    "Create an empty volume, and print its ID. Sandboxes mount it with `barchan run --volume VOLUME:/PATH`.",
		Example: "  barchan volume create data --capacity 50Gi\n  barchan run --volume data:/mnt/data -- sh -c 'date > /mnt/data/now'",
	}
	cmd.Flags().StringVar(&capacity, "capacity", "", "space for its files, such as 50Gi (default 10Gi)")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		n := restclient.NewVolume{Name: args[0]}
		if capacity != "" {
			q, err := resource.ParseQuantity(capacity)
			if err != nil || q.Sign() <= 0 {
				return app.Usage(cmd, errors.New("--capacity: want an amount of space, such as 500Mi or 50Gi"))
			}
			n.Capacity = q.Value()
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
		Long: "List the volumes of the key's namespace. USED and FILES are as they were last measured.",
	}
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			list, err := t.REST.Volumes(cmd.Context())
			if err != nil {
				return err
			}
			return app.PrintList(a, app.Columns[restclient.Volume]{
				Header: []string{"ID", "NAME", "CAPACITY", "USED", "SANDBOXES", "FILES"}, Wide: 1,
				None: "no volumes; `barchan volume create VOLUME` makes one",
				Row: func(v *restclient.Volume) []string {
					return []string{v.VolumeID, v.Name, terminal.Size(v.Capacity), terminal.Size(v.Used), strconv.Itoa(v.Sandboxes), strconv.FormatInt(v.Files, 10)}
				},
			}, list)
		})
	}
	return cmd
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
			line("Used", terminal.Size(v.Used)+", of "+strconv.FormatInt(v.Files, 10)+" files")
			line("Sandboxes", strconv.Itoa(v.Sandboxes))
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
